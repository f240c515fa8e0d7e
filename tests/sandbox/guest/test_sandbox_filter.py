"""The seccomp filter, interpreted here for both machines."""

import struct

import pytest

from rollpacker.sandbox.guest.lockdown import syscalls
from rollpacker.sandbox.guest.lockdown.bpf import build_filters

ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000


def run(
    programs: tuple[bytes, ...], arch: int, number: int, arguments: tuple[int, ...] = ()
) -> int:
    """What the kernel makes of several filters: the strictest answer."""
    answers = [run_one(program, arch, number, arguments) for program in programs]
    return min(answers, key=(KILL, DENY, ALLOW).index)


def run_one(program: bytes, arch: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What a filter answers: an interpreter of the part of BPF that it uses."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *(*arguments, *[0] * 6)[:6])
    place, register = 0, 0
    while True:
        code, yes, no, value = struct.unpack_from("=HBBI", program, 8 * place)
        place += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (register,) = struct.unpack_from("<I", data, value)
            continue
        true = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}
        place += yes if true[code] else no


def allowed(machine: str) -> dict[int, str]:
    column = syscalls.MACHINES.index(machine)
    return {n[column]: name for name, n in syscalls.ALLOWED.items() if n[column] is not None}  # type: ignore[misc]


@pytest.mark.parametrize("machine", syscalls.MACHINES)
@pytest.mark.parametrize("files", [True, False])
def test_only_what_is_listed_is_allowed(machine: str, files: bool) -> None:
    filters, arch = build_filters(machine, files), syscalls.AUDIT_ARCH[machine]
    column = syscalls.MACHINES.index(machine)
    opens = {numbers[column] for numbers in syscalls.OPEN.values()} if files else set()
    # With all arguments zero: open for reading, F_DUPFD, prlimit of itself.
    zero = {syscalls.FCNTL[column], syscalls.PRLIMIT[column]} | opens
    expected = set(allowed(machine)) | {number for number in zero if number is not None}
    found = {n for n in range(1024) if run(filters, arch, n) == ALLOW}
    assert found == expected
    refused = {run(filters, arch, n) for n in range(1024) if n not in expected}
    assert refused == {DENY}


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_the_zygote_keeps_little_more(machine: str) -> None:
    (program, _), arch = build_filters(machine, True), syscalls.AUDIT_ARCH[machine]
    column = syscalls.MACHINES.index(machine)
    for numbers in syscalls.ZYGOTE.values():
        assert run((program,), arch, numbers[column]) == ALLOW
    execve, ptrace = ((59, 101), (221, 117))[column]
    assert run((program,), arch, execve) == run((program,), arch, ptrace) == DENY


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_arguments_are_looked_at(machine: str) -> None:
    filters, arch = build_filters(machine, True), syscalls.AUDIT_ARCH[machine]
    column = syscalls.MACHINES.index(machine)
    for numbers in syscalls.OPEN.values():
        number, place = numbers[column], numbers[2]
        if number is None:
            continue
        for flags, answer in ((0, ALLOW), (0x80000, ALLOW), (1, DENY), (2, DENY), (0x42, DENY)):
            arguments = (*[0] * place, flags)
            assert run(filters, arch, number, arguments) == answer
    fcntl, ioctl, prlimit = (
        each[column] for each in (syscalls.FCNTL, syscalls.IOCTL, syscalls.PRLIMIT)
    )
    # F_SETOWN, F_SETSIG, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, F_ADD_SEALS.
    for command in (8, 10, 1024, 1026, 1031, 1033):
        assert run(filters, arch, fcntl, (0, command)) == DENY
    assert run(filters, arch, ioctl, (0, 0x5401)) == ALLOW
    assert run(filters, arch, ioctl, (0, 0x5412)) == DENY
    assert run(filters, arch, prlimit, (1234,)) == DENY
    # (pid, resource, new limits, old limits): RLIMIT_CPU may be read, others set.
    for arguments in ((0, 0, 0, 1 << 40), (0, 3, 1 << 40), (0, 9, 1)):
        assert run(filters, arch, prlimit, arguments) == ALLOW
    for arguments in ((0, 0, 1), (0, 0, 1 << 40), (0, 1 << 32, 1 << 40)):
        assert run(filters, arch, prlimit, arguments) == DENY


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_other_machines_are_killed(machine: str) -> None:
    filters = build_filters(machine, True)
    assert run(filters, 0x40000003, 3) == KILL
    if machine == "x86_64":
        assert run(filters, syscalls.AUDIT_ARCH[machine], 0x40000000) == KILL


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_every_number_is_listed_once(machine: str) -> None:
    column = syscalls.MACHINES.index(machine)
    tables = [syscalls.ALLOWED.values(), syscalls.OPEN.values(), syscalls.ZYGOTE.values()]
    numbers = [each[column] for table in tables for each in table if each[column] is not None]
    numbers += [each[column] for each in (syscalls.FCNTL, syscalls.IOCTL, syscalls.PRLIMIT)]
    assert len(numbers) == len(set(numbers))


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no system call table for riscv64"):
        build_filters("riscv64", True)

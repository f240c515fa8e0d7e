"""Modules that programs import, loaded once for all of them.

A fork copies the tables of all that is loaded, and each shared library has five: what is rarely
used is left to the programs that use it. Loaded is what many import, what is needed here, and what
wants a shared library from outside of the standard library, which a program cannot open.
"""

from __future__ import annotations

import importlib

_FREQUENT = (
    "__future__ abc array ast atexit base64 binascii bisect builtins collections collections.abc "
    "contextlib copy ctypes dataclasses datetime decimal difflib enum fractions functools gc "
    "hashlib heapq inspect io itertools json keyword math numbers operator pprint queue random re "
    "reprlib resource select signal stat statistics string struct textwrap threading time "
    "traceback types typing unicodedata unittest warnings weakref zlib _sitebuiltins"
)
_OTHERS = (
    "argparse calendar cmath csv encodings.idna encodings.latin_1 encodings.utf_8_sig graphlib "
    "html locale logging secrets shlex timeit urllib.parse uuid _strptime"
)


def run(level: str) -> None:
    """Import them: at level ``basic`` all, as nothing can be opened there."""
    for name in (_FREQUENT + " " + _OTHERS * (level == "basic")).split():
        importlib.import_module(name)

"""Modules that programs import, loaded once for all of them.

A fork copies the tables of all loaded modules, so rare ones are left to the programs. Loaded are
modules that many programs import, that the guest needs, or whose shared library lies outside of the
standard library, where a program cannot open it.
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
    """Import them: all at level ``basic``, where nothing can be opened."""
    for name in (_FREQUENT + " " + _OTHERS * (level == "basic")).split():
        importlib.import_module(name)

"""Modules that programs often import, loaded once for all of them.

At level ``basic`` they are the only ones, as nothing can be opened there.
"""

from __future__ import annotations

import importlib

_MODULES = (
    "__future__ abc argparse array ast atexit base64 binascii bisect builtins calendar cmath "
    "collections collections.abc contextlib copy csv ctypes dataclasses datetime decimal difflib "
    "encodings.idna encodings.latin_1 encodings.utf_8_sig enum fractions functools gc graphlib "
    "hashlib heapq html inspect io itertools json keyword locale logging math numbers operator "
    "pprint queue random re reprlib resource secrets select shlex signal stat statistics string "
    "struct textwrap threading time timeit traceback types typing unicodedata unittest "
    "urllib.parse uuid warnings weakref zlib _sitebuiltins _strptime"
)


def run() -> None:
    """Import them all."""
    for name in _MODULES.split():
        importlib.import_module(name)

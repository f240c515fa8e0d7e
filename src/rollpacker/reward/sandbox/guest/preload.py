"""Modules that programs often import, loaded once for all of them.

At level ``basic`` they are the only ones, as nothing can be opened there.
"""

from __future__ import annotations

import contextlib
import importlib

# Names differ by version, and a build may lack some.
_EXTENSIONS = (
    "_bisect _blake2 _csv _ctypes _datetime _decimal _hashlib _heapq _json _opcode _queue _random "
    "_sha2 _sha512 _socket _statistics _struct _typing _uuid array binascii cmath fcntl math "
    "resource select unicodedata zlib"
)
_MODULES = (
    "__future__ abc argparse array ast atexit base64 binascii bisect builtins calendar cmath "
    "collections collections.abc contextlib copy csv ctypes dataclasses datetime decimal difflib "
    "encodings.idna encodings.latin_1 encodings.utf_8_sig enum fractions functools gc graphlib "
    "hashlib heapq html inspect io itertools json keyword locale logging math numbers operator "
    "pprint queue random re reprlib resource secrets select shlex signal stat statistics string "
    "struct textwrap threading time timeit traceback types typing unicodedata unittest "
    "urllib.parse uuid warnings weakref zlib _sitebuiltins _strptime"
)


def extensions() -> None:
    """Load shared libraries before anything else, so that they do not part the heap."""
    for name in _EXTENSIONS.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run() -> None:
    """Import them all."""
    for name in _MODULES.split():
        importlib.import_module(name)

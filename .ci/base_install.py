"""Run by the Python of a base install: what must work without torch works without torch."""

import importlib
import importlib.util
import pkgutil
import sys

PACKAGES = ("rollpacker", "rollpacker.core", "rollpacker.config", "rollpacker.policy")
PACKAGES += ("rollpacker.report", "rollpacker.cli", "rollpacker.runtime.cluster.machine_checks")
HEAVY = ("torch", "transformers", "datasets", "ray", "vllm")

for name in PACKAGES:
    importlib.import_module(name)
PURE = ("core", "config", "policy", "polytrace", "sim")
for name in (f"rollpacker.{part}" for part in PURE):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        importlib.import_module(module.name)
there = [name for name in HEAVY if importlib.util.find_spec(name) or name in sys.modules]
if there:
    sys.exit(f"the base install brought {', '.join(there)}")
print(f"imported {len([m for m in sys.modules if m.startswith('rollpacker')])} modules, no torch")

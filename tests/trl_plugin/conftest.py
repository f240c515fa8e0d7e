"""The release of TRL that is on the path: ``make test-trl`` runs with the oldest and the newest."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("trl") else ["test_*.py"]

import sys
from pathlib import Path

# Scripts that import their neighbours, as Python does for a script's own folder.
sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

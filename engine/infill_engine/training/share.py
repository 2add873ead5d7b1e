"""Writes an adapter with a share of its updates: `python -m infill_engine.training.share ADAPTER SHARE --out FILE`.

Which share is best is measured as the model serves, by `python -m infill_engine.training.memory --adapter FILE`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from infill_engine import adapter


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infill_engine.training.share", description=__doc__)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("share", type=float, help="from 0, the base, to 1, all that was learned")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        tensors = adapter.scaled(adapter.load(options.adapter), options.share)
    except ValueError as error:
        parser.error(str(error))
    adapter.save(tensors, {**adapter.card(options.adapter), "share": str(options.share)}, options.out)


if __name__ == "__main__":
    main()

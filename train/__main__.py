"""Train firstlight-nano: `python -m train --folder run`. A file FOLDER/decay.json ends the run; a later start goes on from FOLDER/state.pt.

decay.json is {"from": STEP, "steps": NUM}: from that step on experts are rounded to MXFP4 and the rate falls to zero.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.multiprocessing as mp

from train.trainer import work


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="holds corpus/, gets state.pt and log.jsonl")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--port", type=int, default=29533)
    options = parser.parse_args()
    mp.spawn(work, (options.processes, options.folder, options.port), options.processes)


if __name__ == "__main__":
    main()

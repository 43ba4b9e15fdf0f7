"""The table of models: live runs on the vLLM that is installed, a record for each, and docs/models.md from the records.

    python tests/models/run.py                 # all families
    python tests/models/run.py Llama gpt-oss   # some
    python tests/models/run.py --missing       # those without a record for this vLLM and device
    python tests/models/run.py --table         # docs/models.md anew, no runs

Exit code 1 if a run is neither right, nor refused as it must be, nor known not to run on this device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from zoo.families import FAMILIES
from zoo.table import RECORDS, TABLE, coordinate, table, write_record

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # where the records look for errors of workers
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *(family.name for family in FAMILIES)], metavar="NAME")
    parser.add_argument("--missing", action="store_true", help="only those without a record")
    parser.add_argument("--table", action="store_true", help="only the table, from the records that are there")
    parser.add_argument("--out", type=Path, default=RECORDS, metavar="DIR", help=f"for records (default {RECORDS})")
    arguments = parser.parse_args()
    good = True
    if not arguments.table:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        import transformers
        from zoo.record import FAILED, WRONG, run

        import vllm_compat

        vllm_compat.activate()
        for family in FAMILIES:
            if arguments.names and family.name not in arguments.names:
                continue
            if arguments.missing and (arguments.out / coordinate() / f"{family.name}.json").exists():
                continue
            if not hasattr(transformers, family.config):
                print(f"{family.name}: transformers {transformers.__version__} has no {family.config}", flush=True)
                continue
            start = time.monotonic()
            record = run(family)
            write_record(arguments.out, record.as_dict())
            numbers = {key: value for key, value in record.as_dict().items() if isinstance(value, float)}
            took = time.monotonic() - start
            print(f"{family.name}: {record.verdict} {json.dumps(numbers)} {record.text} ({took:.0f} s)", flush=True)
            good &= record.verdict not in (WRONG, FAILED)
    if arguments.out == RECORDS:
        TABLE.write_text(table(RECORDS), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":  # vLLM's spawned workers import this module again
    sys.exit(main())

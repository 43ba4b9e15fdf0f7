"""The table of models, its records and what the package itself claims, held together."""

from __future__ import annotations

import re

import pytest
from zoo.families import FAMILIES
from zoo.table import RECORDS, TABLE, records, table

from vllm_compat.patches import _models

COORDINATES = {where: {record["model"]: record for record in those} for where, those in records().items()}
EVERY = [
    pytest.param(record, id=f"{where}-{name}") for where, those in COORDINATES.items() for name, record in those.items()
]


def test_the_page_is_what_the_records_make() -> None:
    assert TABLE.read_text(encoding="utf-8") == table(RECORDS), "run: python tests/models/run.py --table"


def test_every_record_is_of_a_family() -> None:
    for those in COORDINATES.values():
        assert those.keys() <= {family.name for family in FAMILIES}


@pytest.mark.parametrize("record", EVERY)
def test_no_record_is_a_failure(record: dict) -> None:
    """A right one has numbers within the limits, another one says why in words, without a path of the machine."""
    assert not re.search(r"(^|[\s\"'(])/\w", record["text"])
    assert record["verdict"] in ("right", "refused", "cannot run here")
    if record["verdict"] == "right":
        assert record["rows"] > 0
        assert 0 < record["share_of_tolerance"] <= 1
        assert record["row_margin"] > 0
        assert record["layer_margin"] > 0
        assert record["text"] == ""
    else:
        assert record["text"]
        assert record["rows"] is None


def test_the_package_claims_what_the_records_show() -> None:
    shown = {r["architecture"] for those in COORDINATES.values() for r in those.values() if r["verdict"] == "right"}
    assert shown == _models.SHOWN


def test_a_refusal_names_the_class() -> None:
    refused = [r for those in COORDINATES.values() for r in those.values() if r["verdict"] == "refused"]
    assert refused
    for record in refused:
        assert f"model class {record['architecture']} is not supported: " in record["text"]


def test_a_refusal_gives_a_reason_that_the_package_still_gives() -> None:
    reasons = {*_models.REFUSED.values(), *(value for value in vars(_models).values() if isinstance(value, str))}
    for where, those in COORDINATES.items():
        for name, record in those.items():
            if record["verdict"] == "refused":
                reason = record["text"].partition(" is not supported: ")[2].removesuffix(". Nothing has been loaded.")
                assert reason in reasons, f"{where}/{name}: run tests/models/run.py {name} on that vLLM and device"

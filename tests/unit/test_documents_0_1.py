"""Documents that version 0.1 wrote are read, and mean the same."""

import json
from pathlib import Path

import pytest
import yaml

from powerband.errors import DocumentError
from powerband.store import documents

FOLDER = Path(__file__).parents[1] / "fixtures/documents-0.1"
FILES = sorted(FOLDER.iterdir())


def test_there_is_one_of_each_kind_that_0_1_wrote() -> None:
    kinds = {documents.read(path).kind for path in FILES}
    assert kinds >= {"deployment", "measurement", "recipe", "slo", "study", "tenants", "fleet", "workload"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_document_of_0_1_is_read_and_written_again(path: Path) -> None:
    document = documents.read(path)
    again = documents.parse(document.to_text(), source="again.yaml")
    assert again == document and again.digest() == document.digest()
    assert documents.parse(document.to_json(), source="again.json") == document


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_value_of_it_is_lost(path: Path) -> None:
    """Every number and name that the file has is in the document, though a key may have another name now."""
    text = path.read_text()
    data = json.loads(text) if text.startswith("{") else yaml.load(text, yaml.BaseLoader)
    kept = set(_leaves(documents.read(path).model_dump(mode="json")))
    numbers = {one for one in _leaves(data) if isinstance(one, (int, float)) and not isinstance(one, bool)}
    assert {float(one) for one in numbers} <= {float(one) for one in kept if isinstance(one, (int, float))}


def test_an_old_and_a_new_name_of_one_key_are_not_given_together() -> None:
    text = (FOLDER / "fleet.yaml").read_text().replace("most_replicas: 4", "most_replicas: 4\n    max_replicas: 5")
    with pytest.raises(DocumentError, match="'most_replicas' is the old name of 'max_replicas'"):
        documents.parse(text, source="fleet.yaml")


def _leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, list) else [value]

"""Documents from files of every kind, and one clear error for each that is not as it should be."""

import importlib.util
import json
import sys

import pytest

from isokron.tasks.documents import Document, read_documents, read_prompts

TEXTS = ["War and peace.", 'She said "no", twice;\nthen — left.', "x" * 200_000 + " the end"]


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def quoted(text):
    return '"' + text.replace('"', '""') + '"'


def test_json_lines(tmp_path):
    rows = "".join(
        json.dumps({"text": text, "n": 3}, ensure_ascii=False) + "\r\n" for text in TEXTS
    )
    found = read_documents(write(tmp_path, "a.jsonl", "\ufeff" + rows + "\n"))
    assert found == [Document(str(k), text) for k, text in enumerate(TEXTS, 1)]


def test_json_with_a_list(tmp_path):
    rows = json.dumps([{"text": text} for text in TEXTS], indent=1)
    assert [d.text for d in read_documents(write(tmp_path, "a.json", rows))] == TEXTS


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
def test_separated_values(tmp_path, name, separator):
    lines = [separator.join([f"n{k}", quoted(text), str(k % 2)]) for k, text in enumerate(TEXTS)]
    path = write(tmp_path, name, "\n".join([separator.join(["id", "words", "class"]), *lines]))
    found = read_documents(path, text="words", label="class")
    assert found == [Document(f"n{k}", text, str(k % 2)) for k, text in enumerate(TEXTS)]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    columns = {"text": TEXTS, "label": [0, 1, 0], "id": ["a", "b", "c"]}
    parquet.write_table(pyarrow.table(columns), path)
    found = read_documents(path, label="label")
    assert found == [Document(i, t, y) for i, t, y in zip("abc", TEXTS, "010", strict=True)]
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: no column 'x'; .* text, label, id"):
        read_documents(path, text="x")
    with pytest.raises(ValueError, match=r"Parquet input source '.*b\.parquet'"):
        read_documents(write(tmp_path, "b.parquet", "no"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("who/what", ("who/what", None, "train")),
        ("what:test", ("what", None, "test")),
        ("what:raw:test[:5%]", None),
        ("what:raw:test", ("what", "raw", "test")),
    ],
)
def test_a_data_set_by_name(monkeypatch, name, expected):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, configuration, *, split):  # the true one would go to the network
        asked.append((path, configuration, split))
        return datasets.Dataset.from_dict({"text": TEXTS, "n": [1, 2, 3]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [d.text for d in read_documents(name)] == TEXTS
    assert asked == [expected or ("what", "raw", "test[:5%]")]


def test_paragraphs_of_a_text_are_documents(tmp_path):
    path = write(tmp_path, "a.txt", "\n\nOne line\nand another\r\n \n\n\nThe second\n")
    assert read_documents(path) == [
        Document("1", "One line\nand another"),
        Document("2", "The second"),
    ]


def test_every_text_of_a_folder_is_a_document(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path, "a.txt", "One\n\nTwo")
    write(tmp_path / "b", "c.txt", "Three")
    write(tmp_path, "notes.md", "not this")
    assert read_documents(tmp_path) == [Document("a", "One\n\nTwo"), Document("b/c", "Three")]


def test_labels_and_ids_may_be_numbers(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "one", "y": 0, "key": 7}')
    assert read_documents(path, label="y", id="key") == [Document("7", "one", "0")]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": ', {}, r"a\.jsonl, row 2: not valid .jsonl: Expect"),
        ("a.jsonl", '{"text": "a"}\n["b"]', {}, r"row 2: must be an object, got list"),
        ("a.jsonl", '{"text": "a"}\n\n{"txt": "b"}', {}, r"row 2: no column 'text'; .* are txt"),
        ("a.jsonl", '{"text": ["a"]}', {}, r"row 1: column 'text' must contain text, got list"),
        ("a.jsonl", '{"a": "x", "b": "y"}', {}, r"row 1: no column 'text'; there are a, b"),
        ("a.jsonl", '{"text": "a", "y": null}', {"label": "y"}, r"column 'y' is empty; every row"),
        ("a.jsonl", '{"text": "a"}', {"label": "y"}, r"no column 'y'; there are text"),
        (
            "a.jsonl",
            '{"text": "a", "id": 1}\n{"text": "b", "id": "1"}',
            {},
            r"row 2: an earlier row has the id '1' too; ids must differ",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "caf\xe9"}',
            {},
            r"line 2: byte 0xe9 is not UTF-8; co",
        ),
        ("a.jsonl", "\n", {}, r"a\.jsonl: contains no document"),
        ("a.json", "[1, 2", {}, r"a\.json, row 1: not valid .json"),
        ("a.csv", "", {}, r"a\.csv: contains no document"),
        ("a.csv", "text,y\n", {}, r"a\.csv: contains no document"),
        (
            "a.csv",
            'text,y\n"two\nlines",1\na,b,c\n',
            {},
            r"a\.csv, row 2: .* a value for each of the columns text, y, .* put texts",
        ),
        ("a.csv", 'text,y\na,"b\n', {}, r"row 1: not valid .csv: unexpected end of data"),
        ("a.csv", "text,y,y\na,b,c\n", {}, r"columns text, y, y, which must differ"),
        (
            "a.csv",
            "words,more\na,b\n",
            {"text": "text"},
            r"row 1: no column 'text'; .* words, more",
        ),
        ("a.txt", "\n \n", {}, r"a\.txt: contains no document"),
        ("a.txt", "a", {"text": "words"}, r"no column 'words'; there are text"),
        ("a.docx", "a", {}, r"a\.docx' that can be read; give one of \.jsonl"),
    ],
)
def test_bad_input_is_named_by_place_and_rule(tmp_path, name, content, columns, message):
    with pytest.raises(ValueError, match=message):
        read_documents(write(tmp_path, name, content), **columns)


def test_empty_texts_are_read_for_tasks_to_skip(tmp_path):
    rows = '{"text": "a"}\n{"text": " "}\n{"text": null}\n{"text": ""}'
    texts = [d.text for d in read_documents(write(tmp_path, "a.jsonl", rows))]
    assert texts == ["a", " ", "", ""]
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", "c.txt", "\n")
    assert read_documents(tmp_path / "b") == [Document("c", "\n")]


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"contains no document; in a folder, every \.txt file is one"
    ):
        read_documents(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"prompt": "a", "completion": " b"}\n{"prompt": "c ", "n": 1}',
         [("a", " b"), ("c ", None)]),
        ("a.jsonl", '{"prompt": "a", "completion": null}\n{"prompt": "b", "completion": ""}',
         [("a", None), ("b", None)]),
        ("a.csv", 'completion,prompt\n" b","a, or"\n,c\n', [("a, or", " b"), ("c", None)]),
        ("a.jsonl", '{"text": "a"}', None),
        ("a.txt", "prompt", None),
    ],
)  # fmt: skip
def test_prompts_and_completions(tmp_path, name, content, expected):
    assert read_prompts(write(tmp_path, name, content)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"promt": "b"}', r"row 2: no column 'prompt'; there are promt"),
        ('{"prompt": " "}', r"row 1: column 'prompt' is empty"),
        ('{"prompt": "a", "completion": 3}', r"'completion' must contain text, got int 3"),
    ],
)
def test_bad_prompts_are_named_by_place_and_rule(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path, "a.jsonl", content))


@pytest.mark.parametrize("source", ["no.jsonl", "./no", "/no/such/folder"])
def test_missing_files_are_not_taken_for_data_sets(source):
    with pytest.raises(ValueError, match=r"no file or folder '.*no.*' .*; paths are relative to"):
        read_documents(source)


def test_nothing_is_refused():
    with pytest.raises(ValueError, match="no file or folder ''"):
        read_documents("")


@pytest.mark.parametrize(
    ("source", "package"), [("a.parquet", "pyarrow"), ("some/name", "datasets")]
)
def test_missing_packages_are_named_with_what_to_install(tmp_path, monkeypatch, source, package):
    for module in (package, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    path = str(write(tmp_path, source, "x")) if source.endswith("parquet") else source
    with pytest.raises(
        ModuleNotFoundError, match=rf'package {package}; .* pip install "isokron\[data\]"'
    ):
        read_documents(path)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")
def test_a_name_that_is_no_data_set_is_told_so(monkeypatch):
    import datasets
    import huggingface_hub

    # HF_HUB_OFFLINE is read on import, and without a network each of many requests is tried again
    for place in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="not a file or folder, and no data set of that name"):
        read_documents("surely/no-such-data-set:train")

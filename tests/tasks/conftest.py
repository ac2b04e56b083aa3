"""Folders of tiny Hugging Face models, each saved when a test first asks for it."""

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    from tiny_models import save

    folders = {}

    def of(kind):
        if kind not in folders:
            folders[kind] = save(kind, tmp_path_factory.mktemp(kind) / kind)
        return folders[kind]

    return of

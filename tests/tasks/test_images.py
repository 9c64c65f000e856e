"""image/classification: which images are read, what becomes of their pixels, and what is refused."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from peftlab.errors import PeftlabError
from peftlab.tasks.images import read_image
from peftlab.tasks.labelled import repeated_rows
from peftlab.tasks.labelled_rows import TaskData, load_task_data
from peftlab.tasks.table import DataConfig
from tests.image_models import save_digits

TASK = "image/classification"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_digits(tmp_path_factory.mktemp("images") / "digits", each=4)


@pytest.fixture
def copy(digits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits, tmp_path / "copy"))


def load(path: Path, **keys: Any) -> TaskData:
    return load_task_data(TASK, DataConfig(path=str(path), **{"validation": 3, **keys}))


def table(file: Path, rows: list[tuple[str, str]], header: tuple[str, str] = ("image", "label")) -> Path:
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([header, *rows])
    return file


def test_folders_of_classes_and_tables_of_paths_are_the_same_rows(digits: Path, copy: Path) -> None:
    found = load(digits)
    assert found.task.labels == ("0", "1", "4")
    assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 9, "validation": 3}
    assert sorted(found.splits["validation"]["label"]) == [0, 1, 2]
    assert all(Path(row["text"]).parent.name == found.task.labels[row["label"]] for row in found.splits["train"])
    rows = [(str(path.relative_to(copy)), path.parent.name) for path in sorted(copy.rglob("*.png"))]
    assert load(table(copy / "own.csv", rows)).fingerprint == found.fingerprint
    named = table(copy / "named.tsv", [], ("file", "digit"))
    named.write_text("file\tdigit\n" + "".join(f"{path}\t{name}\n" for path, name in rows))
    assert load(named, image="file", label="digit").fingerprint == found.fingerprint
    rows[0] = ("1/000.png", "0")
    assert load(table(copy / "other.csv", rows)).fingerprint != found.fingerprint


def test_folders_of_splits(digits: Path, tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        shutil.copytree(digits, tmp_path / "splits" / split)
    (tmp_path / "splits" / "valid" / "0" / "000.png").unlink()
    (tmp_path / "splits" / ".DS_Store").touch()
    found = load(tmp_path / "splits", validation=None)
    assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 12, "validation": 11, "test": 12}
    assert repeated_rows(found.task, found.splits) == {
        "validation": 11,
        "test": 12,
    }  # by their contents: their paths differ
    (tmp_path / "splits" / "more").mkdir()
    with pytest.raises(PeftlabError, match="more beside test, train, valid: no split"):
        load(tmp_path / "splits", validation=None)


def damage(place: Path, how: str) -> None:
    """Make something wrong with the first image of a directory."""
    first = place / "0" / "000.png"
    if how == "text":
        first.write_text("no image")
    elif how == "empty":
        first.write_bytes(b"")
    elif how == "deep":
        Image.new("I;16", (4, 4)).save(first)
    elif how == "moving":
        frames = [Image.new("L", (4, 4), shade) for shade in (0, 255)]
        frames[0].save(first, save_all=True, append_images=frames[1:])
    elif how == "other":
        (place / "0" / "notes.txt").touch()
    elif how == "beside":
        shutil.copy(first, place)
    elif how == "pipe":
        first.unlink()
        import os

        os.mkfifo(first)
    elif how == "single":
        for name in ("1", "4"):
            shutil.rmtree(place / name)
    else:
        shutil.rmtree(place)
        place.mkdir()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("text", r"names no image that can be used \(.*000.png: not an image that Pillow can read\) in 1 of 12 rows"),
        ("empty", "not an image that Pillow can read"),
        ("deep", r"more than 8 bits \(mode I;16\)"),
        ("moving", "has 2 frames; save the one to be read"),
        ("other", "notes.txt: no image by its name, which ends in one of .png"),
        ("beside", "000.png is in no folder, and other images are in one"),
        ("pipe", "not a regular file"),
        ("single", "contains a single class, '0'"),
        ("none", "no examples"),
    ],
)
def test_what_is_no_image_is_named(copy: Path, how: str, message: str) -> None:
    damage(copy, how)
    with pytest.raises(PeftlabError, match=message):
        load(copy)


def test_bad_cells_are_named_with_their_lines(copy: Path) -> None:
    file = table(copy / "own.csv", [("0/000.png", "0"), ("0/nowhere.png", "0"), ("1/000.png", "1"), ("", "1")])
    with pytest.raises(PeftlabError, match=r"(?s)is missing.*line 5.*nowhere.png: no such file\).*line 3"):
        load(file, validation=1)
    with pytest.raises(PeftlabError, match=r"no column 'photo' \(data.image\)"):
        load(file, image="photo")
    file = table(
        copy / "kept.csv", [("0/000.png", "0"), ("0/001.png", "0"), ("1/000.png", "1"), ("", "1"), ("1/001.png", "1")]
    )
    assert load(file, validation=1, drop_missing=True).left_out == {"text or label missing": 1}


def test_pixels_are_those_that_people_see(tmp_path: Path) -> None:
    turned = Image.new("RGB", (4, 2), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (2, 4)
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)
    for mode, seen in {"L": 100, "1": 255, "P": 100, "CMYK": 155}.items():
        suffix = "tif" if mode == "CMYK" else "png"
        Image.new(mode, (2, 2), 100).save(tmp_path / f"{mode}.{suffix}")
        image = read_image(tmp_path / f"{mode}.{suffix}")
        assert image.mode == "RGB" and isinstance(seen, int)


def test_a_truncated_image_is_named_when_it_is_read(copy: Path) -> None:
    path = copy / "0" / "000.png"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PeftlabError, match=r"000.png: a damaged image \("):
        read_image(path)

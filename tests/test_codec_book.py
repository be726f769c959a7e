"""Tokens are known again by the codebook that they count in."""

import pytest
import torch
from scd_pack.scd_core.codecs.book import book_of, same_book
from scd_pack.scd_core.models.load import BUNDLED, open_model
from scd_tests.test_detection import lay_out


@pytest.fixture(scope="module")
def book():
    return book_of(open_model(BUNDLED).build("codec"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_rounding_leaves_a_codebook_what_it_is(book, dtype):
    assert same_book(book, book) and same_book(book, book.to(dtype).float())


def test_other_codebooks_are_told_apart(book, generator):
    assert not same_book(book, book.flip(0))
    assert not same_book(book, torch.randn(book.shape, generator=generator))
    assert not same_book(book, book[:-1]) and not same_book(book, book[:, :-1])
    assert not same_book(book, book + 0.2 * book.std() * torch.randn(book.shape, generator=generator))


def test_without_a_codebook_nothing_is_said(book, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert book_of(open_model(lay_out("cosmos-ar-base", tmp_path / "a" / "b")).build("codec")) is None
    assert same_book(None, book) and same_book(book, None) and same_book(None, None)
    assert len(book) >= 32 and book.dtype == torch.float32

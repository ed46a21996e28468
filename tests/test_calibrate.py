"""The calibrated switch: what is chosen and why, what is refused, and that no choice changes a token."""

from __future__ import annotations

import dataclasses
import json
import textwrap

import numpy as np
import pytest

import vpa
from vpa.bench import timing
from vpa.switch import FULL, LOCAL, Entry, Place, SwitchTable

PLACE = Place("vpa 1", "imagined", "nccl", 4, "bfloat16", "raw", "packed")
ENTRIES = (
    Entry(64, 1000, True, (1, 8, 64), (-20.0, -5.0, 40.0), 17),
    Entry(64, 1000, False, (1, 8, 64), (-20.0, -5.0, -1.0), None),
    Entry(32, 500, False, (1, 8), (3.0, 9.0), 1),
)
TABLE = SwitchTable(PLACE, ENTRIES)
HEAD = {"hidden_size": 64, "vocab_size": 1000, "captured": True, "place": PLACE}


@pytest.mark.parametrize(
    ("rows", "way", "why"),
    [
        (0, FULL, "20.0 us lost by it at 1"),
        (16, FULL, "pays from 17 rows on (5.0 us lost by it at 8; captured, calibrated at 1 to 64 rows)"),
        (17, LOCAL, "17 rows, 64 x 1000 over 4 ranks: local argmax, as the local argmax pays from 17 rows on"),
        (9999, LOCAL, "40.0 us saved by it at 64"),
    ],
)
def test_the_way_and_the_reason(rows, way, why):
    choice = TABLE.choose(rows, **HEAD)
    assert choice.way == way and why in choice.why and "\n" not in choice.why


def test_none_in_range_and_all_of_it():
    assert TABLE.choose(64, **{**HEAD, "captured": False}).way == FULL
    assert "pays at no size (called, calibrated at 1 to 64 rows)" in TABLE.choose(64, **{**HEAD, "captured": False}).why
    assert TABLE.choose(1, hidden_size=32, vocab_size=500, captured=False, place=PLACE).way == LOCAL


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Place)])
def test_a_table_of_another_place_is_refused(field):
    other = dataclasses.replace(PLACE, **{field: 8 if field == "tp" else "another"})
    with pytest.raises(ValueError, match=f"of {field} .* here it is (8|'another'): make another by vpa.calibrate"):
        TABLE.choose(1, **{**HEAD, "place": other})


def test_a_head_that_was_not_measured_is_refused():
    with pytest.raises(ValueError, match="of a head of 64 x 999; it has 64 x 1000, 32 x 500"):
        TABLE.choose(1, **{**HEAD, "vocab_size": 999})
    with pytest.raises(ValueError, match="of captured calls with a head of 32 x 500"):
        TABLE.choose(1, **{**HEAD, "hidden_size": 32, "vocab_size": 500})


def test_a_table_is_saved_and_loaded(tmp_path):
    path = tmp_path / "switch.json"
    TABLE.save(path)
    assert SwitchTable.load(path) == TABLE
    with pytest.raises(FileExistsError):
        TABLE.save(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(schema=2), "schema is 2"),
        (lambda content: content.pop("place"), "place"),
        (lambda content: content["place"].update(tp="4"), "tp is '4'; int is accepted"),
        (lambda content: content["place"].update(colour="red"), "colour"),
        (lambda content: content["entries"][0].update(pays_from=1.5), "pays_from is 1.5"),
        (lambda content: content["entries"][0].update(rows=[8, 1, 64]), "do not fit"),
        (lambda content: content["entries"][0].update(rows=[]), "do not fit"),
        (lambda content: content["entries"][0].update(saved_us=["x", 1, 2]), "saved_us is"),
        (lambda content: content.update(entries=3), "not iterable"),
    ],
)
def test_files_that_are_no_table(change, message, tmp_path):
    content = {"schema": 1, **json.loads(json.dumps(dataclasses.asdict(TABLE)))}
    change(content)
    path = tmp_path / "switch.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"cannot read switch table .*{message}"):
        SwitchTable.load(path)


def test_files_that_are_no_json(tmp_path):
    for text in ("", "[]", "[" * 100_000, "null"):
        (tmp_path / "switch.json").write_text(text)
        with pytest.raises(ValueError, match="cannot read switch table"):
            SwitchTable.load(tmp_path / "switch.json")
    with pytest.raises(ValueError, match="No such file"):
        SwitchTable.load(tmp_path / "none.json")


@pytest.mark.parametrize("more", [{}, {"scale": -2.0, "soft_cap": 3.0}, {"mapped": True}], ids=str)
@pytest.mark.parametrize("values", ["random", "ties", "minus_inf", "nan"])
def test_both_ways_give_the_same_tokens(more, values):
    """With a transform and a map too, over rows without a maximum, ties and NaN: the head is the identity."""
    shards = vpa.VocabShard.even(37, 3)
    rng = np.random.default_rng(0)
    weight = np.eye(37, dtype=np.float32)
    heads = [vpa.ParallelLMHead(weight[shard.ids()], shards, shard.rank) for shard in shards]
    hidden = {
        "random": rng.normal(size=(9, 37)), "ties": rng.integers(-1, 2, (9, 37)), "minus_inf": np.full((9, 37), -1e30),
        "nan": np.where(rng.random((9, 37)) < 0.1, np.nan, 1.0),
    }[values].astype(np.float32)  # fmt: skip
    more = dict(more)
    if more.pop("mapped", False):
        more = {"draft_to_target": np.arange(37) + 2, "target_vocab_size": 80}
    tokens = [vpa.LogitsProcessor(mode=mode, **more).get_top_tokens(heads, hidden) for mode in ("local", "full")]
    assert tokens[0].dtype == tokens[1].dtype == np.int64 and np.array_equal(*tokens)


def test_settings_that_do_not_fit():
    for settings in ({"mode": "fast"}, {"mode": "auto"}, {"mode": "full", "switch": TABLE}, {"switch": TABLE}):
        with pytest.raises(ValueError, match=r"mode is .*'auto' with a table of vpa.calibrate"):
            vpa.LogitsProcessor(**settings)


def head_of(hidden_size: int = 8, vocab_size: int = 50) -> vpa.ParallelLMHead:
    return vpa.ParallelLMHead.seeded(0, vpa.VocabShard.even(vocab_size, 1), hidden_size=hidden_size, dtype="float32")


def test_the_table_of_times_that_are_known(monkeypatch):
    """The local argmax takes 10 us always, the full gather as many as there are rows."""
    monkeypatch.setattr(timing, "time_called", made_up(lambda rows: rows))
    table = vpa.calibrate(vpa.comm.solo(), [head_of()], rows=(64, 1, 4, 16))
    (entry,) = table.entries
    assert (entry.rows, entry.saved_us, entry.captured) == ((1, 4, 16, 64), (-9, -6, 6, 54), False)
    assert entry.pays_from == 10
    processor = vpa.LogitsProcessor(mode="auto", switch=table)
    assert [processor.choose(head_of(), rows).way for rows in (9, 10)] == [FULL, LOCAL]
    hidden = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    for rows in (0, 3, 12):
        expected = processor.compute_logits(head_of(), hidden[:rows]).argmax(axis=1)
        assert np.array_equal(processor.get_top_tokens(head_of(), hidden[:rows]), expected)


def test_a_loss_within_the_noise_does_not_leave_the_local_argmax(monkeypatch):
    monkeypatch.setattr(timing, "time_called", made_up(lambda rows: 9, noise=2))
    (entry,) = vpa.calibrate(vpa.comm.solo(), [head_of()], rows=(1, 4)).entries
    assert entry.saved_us == (-1, -1) and entry.pays_from == 1
    monkeypatch.setattr(timing, "time_called", made_up(lambda rows: 9))
    (entry,) = vpa.calibrate(vpa.comm.solo(), [head_of()], rows=(1, 4)).entries
    assert entry.pays_from is None


def made_up(full, noise: float = 0.0):
    """``timing.time_called`` with these times, by the number of tokens that a call gives."""

    def time_called(steps, calls, rounds, barrier, finish):
        rows = len(steps["local"]())
        return {
            "full": np.full(rounds, full(rows)),
            "local": np.full(rounds, 10.0),
            "again": np.full(rounds, 10.0 + noise),
        }

    return time_called


@pytest.mark.parametrize(
    ("called", "captured", "ways"), [(1, None, [FULL, LOCAL]), (1, 1, [LOCAL]), (None, 5, [LOCAL, FULL])]
)
def test_a_call_warms_up_for_a_capture_that_goes_the_other_way(called, captured, ways, monkeypatch):
    """At the first call of a kind only; arrays pass for a GPU's, of which none is being captured."""
    head, gone = head_of(), []
    processor = vpa.LogitsProcessor()
    entries = [Entry(8, 50, True, (1, 9), (1.0, 1.0), captured), Entry(8, 50, False, (1, 9), (1.0, 1.0), called)]
    processor = vpa.LogitsProcessor(mode="auto", switch=SwitchTable(processor.place(head), tuple(entries)))
    right = vpa.LogitsProcessor._tokens_by
    monkeypatch.setattr(
        vpa.LogitsProcessor, "_tokens_by", lambda self, way, *rest: gone.append(way) or right(self, way, *rest)
    )
    monkeypatch.setattr("vpa.logits._capturing", lambda array: False)
    hidden = np.random.default_rng(0).normal(size=(7, 8)).astype(np.float32)
    for _ in range(2):
        processor.get_top_tokens(head, hidden)
    assert gone == [*ways, ways[-1]]
    monkeypatch.setattr("vpa.logits._capturing", lambda array: True)
    processor.get_top_tokens(head, hidden)
    assert gone[-1] == ways[0]


def test_ways_that_differ_are_not_timed(monkeypatch):
    monkeypatch.setattr("vpa.logits.full_argmax", lambda logits: np.zeros(len(logits), np.int64) - 1)
    with pytest.raises(RuntimeError, match="both ways differ in 4 of 4 tokens"):
        vpa.calibrate(vpa.comm.solo(), [head_of()], rows=(4,))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"shapes": []}, ValueError, "at least one of each"),
        ({"rows": ()}, ValueError, "at least one of each"),
        ({"rows": (0,)}, ValueError, "rows is 0; it is at least 1"),
        ({"shapes": ["llama"]}, ValueError, "shape 'llama' is not known"),
        ({"shapes": ["minimax-m3"]}, ValueError, "has no hidden size here; give"),
        ({"shapes": [3]}, TypeError, "a shape is 3"),
        ({"shapes": [(3, 0)]}, ValueError, "vocabulary is 0"),
        ({"dtype": "float64"}, TypeError, "float64"),
        ({"calls": 0}, ValueError, "calls is 0"),
        ({"shapes": [head_of(), (8, 50)]}, ValueError, "one dtype is accepted"),
    ],
)
def test_arguments_that_do_not_fit(arguments, kind, message):
    given = {"shapes": [(8, 50)], "rows": (1,), **arguments}
    with pytest.raises(kind, match=message):
        vpa.calibrate(vpa.comm.solo(), given.pop("shapes"), **given)


START = """
import dataclasses, sys, numpy as np, vpa
comm = vpa.comm.from_mpi("mpi", timeout=20)
head = vpa.ParallelLMHead.seeded(3, vpa.VocabShard.even(501, comm.size), comm.rank, hidden_size=16, dtype="float32")
hidden = np.random.default_rng(0).normal(size=(9, 16)).astype(np.float32)
"""


def program(body: str) -> list[str]:
    return ["-c", START + textwrap.dedent(body) + "\ncomm.close()"]


@pytest.mark.mpi
class TestRanks:
    def test_all_get_one_table_and_the_same_tokens(self, ranks):
        body = """
        table = vpa.calibrate(comm, [head, (16, 64)], dtype="float32", rows=(1, 4), calls=2)
        tables = comm.exchange(table)
        assert all(one == table for one in tables) and len(table.entries) == 2 and table.place.tp == comm.size
        local = vpa.LogitsProcessor(comm).get_top_tokens(head, hidden)
        assert np.array_equal(vpa.LogitsProcessor(comm, mode="full").get_top_tokens(head, hidden), local)
        entry = table.entries[0]
        for start in (None, 1, 5):
            switch = dataclasses.replace(table, entries=(dataclasses.replace(entry, pays_from=start),))
            processor = vpa.LogitsProcessor(comm, mode="auto", switch=switch)
            for rows in (1, 9):
                assert np.array_equal(processor.get_top_tokens(head, hidden[:rows]), local[:rows])
        print("alike")
        """
        done = ranks(3, program(body), timeout=60)
        assert done.returncode == 0 and done.stdout.count("alike") == 3, done.stderr

    @pytest.mark.parametrize("change", ["place", "entries"])
    def test_a_foreign_table_on_one_rank_is_an_error_on_all(self, ranks, change):
        """Refused by the one and told to the others; or another choice, which all are told. The next call works."""
        body = f"""
        table = vpa.calibrate(comm, [head], rows=(1,), calls=1)
        mine = [dataclasses.replace(table, entries=(dataclasses.replace(table.entries[0], pays_from=1),))] * 3
        if {change!r} == "place":
            mine[1] = dataclasses.replace(table, place=dataclasses.replace(table.place, device="another"))
        else:
            mine[1] = dataclasses.replace(table, entries=(dataclasses.replace(table.entries[0], pays_from=None),))
        try:
            vpa.LogitsProcessor(comm, mode="auto", switch=mine[comm.rank]).get_top_tokens(head, hidden)
        except ValueError as error:
            sys.stdout.write("refused: " + str(error) + "\\n")
        vpa.LogitsProcessor(comm).get_top_tokens(head, hidden)
        """
        done = ranks(3, program(body), timeout=60)
        assert done.returncode == 0 and done.stdout.count("refused: ") == 3, done.stderr
        said = "rank 1 raised ValueError: this switch" if change == "place" else "ranks call with different function"
        assert done.stdout.count(said) == (2 if change == "place" else 3)

    def test_arguments_that_differ_are_an_error_on_all(self, ranks):
        body = """
        for arguments in ({"rows": (1 + comm.rank,)}, {"rows": (0 if comm.rank else 1,)}):
            try:
                vpa.calibrate(comm, [head], **arguments)
            except ValueError as error:
                sys.stdout.write(f"refused: {error}\\n")
        """
        done = ranks(2, program(body), timeout=60)
        assert done.returncode == 0 and done.stdout.count("refused: ") == 4, done.stderr
        assert done.stdout.count("ranks call with different rows") == 2


@pytest.mark.gpu
def test_on_a_gpu_captured_calls_have_entries_of_their_own():
    import cupy

    table = vpa.calibrate(vpa.comm.solo(), [(64, 5000)], rows=(1, 8), library=cupy)
    assert [entry.captured for entry in table.entries] == [False, True]
    head = vpa.ParallelLMHead.seeded(0, vpa.VocabShard.even(5000, 1), hidden_size=64, library=cupy)
    hidden = cupy.asarray(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32))
    processor, kept = vpa.LogitsProcessor(mode="auto", switch=table), []
    expected = vpa.LogitsProcessor().get_top_tokens(head, hidden)
    assert cupy.array_equal(processor.get_top_tokens(head, hidden), expected)
    for called, captured in ((1, None), (None, 1)):  # the capture goes the way that the warm-up does not
        entries = [dataclasses.replace(one, pays_from=captured if one.captured else called) for one in table.entries]
        processor = vpa.LogitsProcessor(mode="auto", switch=dataclasses.replace(table, entries=tuple(entries)))
        graph = vpa.CapturedTokens(
            processor.comm, lambda p=processor: kept.append(p.get_top_tokens(head, hidden)), (), None
        )
        graph.replay()
        assert cupy.array_equal(kept[-1], expected)
        graph.close()
    with pytest.raises(ValueError, match="of device"):
        processor.choose(vpa.ParallelLMHead.seeded(0, vpa.VocabShard.even(5000, 1), hidden_size=64), 1)

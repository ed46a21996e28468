"""The calibrated switch: what is chosen and why, what is refused, and that no choice changes a token."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap

import numpy as np
import pytest

import vpa
from vpa import kernels
from vpa.bench import timing
from vpa.crossover import COSTS, PAYS, UNCLEAR
from vpa.switch import FULL, LOCAL, SCHEMA, Entry, Place, SwitchTable

PLACE = Place("vpa 1", "0123", "imagined", "nccl", 1, 4, 4, "bfloat16", "raw", "packed")
ENTRIES = (
    Entry(64, 1000, True, (1, 8, 64), (-20.0, -5.0, 40.0), (COSTS, COSTS, PAYS), 17),
    Entry(64, 1000, False, (1, 8, 64), (-20.0, -5.0, -1.0), (COSTS, UNCLEAR, COSTS), None),
    Entry(32, 500, False, (1, 8), (3.0, 9.0), (PAYS, PAYS), 1),
    Entry(32, 501, False, (1, 8, 64), (-1.0, 9.0, 0.5), (UNCLEAR, PAYS, UNCLEAR), 1),
)
TABLE = SwitchTable(PLACE, ENTRIES)
HEAD = {"hidden_size": 64, "vocab_size": 1000, "captured": True, "place": PLACE}


@pytest.mark.parametrize(
    ("rows", "way", "why"),
    [
        (0, FULL, "(20.0 us lost by it at 1 row; captured"),
        (
            16,
            FULL,
            "full gather, as the local argmax still costs at 8 rows and pays from 17 rows on (5.0 us lost by it at "
            "8 rows, 40.0 us saved by it at 64 rows; captured, calibrated at 1 to 64 rows)",
        ),
        (17, LOCAL, "17 rows, 64 x 1000 over 4 ranks: local argmax, as the local argmax pays from 17 rows on (5.0 us"),
        (9999, LOCAL, "(40.0 us saved by it at 64 rows; captured"),
    ],
)
def test_the_way_and_the_reason(rows, way, why):
    choice = TABLE.choose(rows, **HEAD)
    assert choice.way == way and why in choice.why and "\n" not in choice.why


def test_none_in_range_and_all_of_it():
    assert TABLE.choose(64, **{**HEAD, "captured": False}).way == FULL
    assert TABLE.choose(64, **{**HEAD, "captured": False}).why.endswith(
        "as the local argmax still costs at 64 rows and pays from no size on (1.0 us lost by it at 64 rows; called, "
        "calibrated at 1 to 64 rows)"
    )
    assert TABLE.choose(1, hidden_size=32, vocab_size=500, captured=False, place=PLACE).way == LOCAL


@pytest.mark.parametrize(
    ("rows", "measured"),
    [
        (1, "its loss at 1 row is within noise, 1.0 us"),
        (5, "its loss at 1 row is within noise, 1.0 us, 9.0 us saved by it at 8 rows"),
        (64, "its gain at 64 rows is within noise, 0.5 us"),
    ],
)
def test_a_loss_within_noise_is_no_gain(rows, measured):
    """The way without memory for logits is taken, and the reason does not say that it pays."""
    choice = TABLE.choose(rows, **{**HEAD, "hidden_size": 32, "vocab_size": 501, "captured": False})
    assert choice.way == LOCAL
    assert f"as the local argmax does not clearly cost from 1 row on ({measured}; called" in choice.why


@pytest.mark.parametrize(("rows", "kind"), [(-1, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)])
def test_rows_that_are_no_number_of_rows(rows, kind):
    with pytest.raises(kind, match=f"rows is {rows}; "):
        TABLE.choose(rows, **HEAD)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Place)])
def test_a_table_of_another_place_is_refused(field):
    for value in (8, None) if field in ("hosts", "gpus") else (8,) if field == "tp" else ("another",):
        other = dataclasses.replace(PLACE, **{field: value})
        words = f"of {field} .* here it is {value!r}( \\(.*\\))?: calibrate again, by vpa.calibrate\\(\\)$"
        with pytest.raises(ValueError, match=words):
            TABLE.choose(1, **{**HEAD, "place": other})


def test_a_place_knows_its_kernels_and_its_interconnect(monkeypatch):
    """Four ranks that share a GPU, on one machine, are another place than four with a GPU each, or on two machines; a
    communicator that does not say is one of its own."""
    head, places = head_of(), []
    for told in ({"hosts": 1, "gpus": 4}, {"hosts": 1, "gpus": 1}, {"hosts": 2, "gpus": 4}, {}):
        comm = type("Comm", (), {"rank": 0, "size": 1, "all_gather": 0, "close": 0, "transport": "nccl", **told})()
        places.append(vpa.LogitsProcessor(comm).place(head))
        assert (places[-1].hosts, places[-1].gpus) == (told.get("hosts"), told.get("gpus"))
    assert len(set(places)) == 4
    assert places[0].kernels == kernels.digest()
    monkeypatch.setattr(kernels, "digest", lambda: "another")
    assert vpa.LogitsProcessor(vpa.comm.solo()).place(head).kernels == "another"


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
        (lambda content: content.update(schema=1), "schema is 1; 2 is accepted: calibrate again, by vpa.calibrate"),
        (lambda content: content.pop("place"), "place"),
        (lambda content: content["place"].pop("gpus"), "its place has no gpus: calibrate again, by vpa.calibrate"),
        (lambda content: content["entries"][0].pop("verdicts"), "its entry has no verdicts: calibrate again"),
        (lambda content: content["entries"][0].update(rows=[-3, 0, 1]), r"rows \[-3, 0, 1\] .*from 1 on"),
        (lambda content: content["entries"][0].update(pays_from=-7), "pays_from -7; numbers from 1 on"),
        (lambda content: content["entries"][0].update(saved_us=[math.nan, 1, 2]), "saved_us .*nan.* finite"),
        (lambda content: content["entries"][0].update(saved_us=[10**400, 1, 2]), "saved_us .* finite"),
        (lambda content: content["entries"][0].update(verdicts=["pays", "pays"]), "2 verdicts; they do not fit"),
        (lambda content: content["entries"][0].update(verdicts=["pays", "pays", "x"]), "verdicts .*'x'.* accepted"),
        (lambda content: content["entries"][0].update(hidden_size=-1), "a head of -1 x 1000; each is of sizes from 1"),
        (lambda content: content["entries"].append(content["entries"][0]), "a head of 64 x 1000; .* and once"),
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
    content = {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(TABLE)))}
    change(content)
    path = tmp_path / "switch.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"cannot read switch table .*{message}") as error:
        SwitchTable.load(path)
    assert "\n" not in str(error.value)


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
    assert entry.saved_us == (-1, -1) and entry.pays_from == 1 and entry.verdicts == (UNCLEAR, UNCLEAR)
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
    entries = [
        Entry(8, 50, kind, (1, 9), (1.0, 1.0), (PAYS, PAYS), start)
        for kind, start in ((True, captured), (False, called))
    ]
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
        ({"library": "numpy"}, TypeError, "library is 'numpy'; the module numpy or cupy is accepted"),
        ({"library": math}, TypeError, "library is <module 'math'.*the module numpy or cupy is accepted"),
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
        assert table.place.hosts == comm.hosts == 1 and table.place.gpus == comm.gpus
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
        library = "numpy" if comm.rank else None
        for arguments in ({"rows": (1 + comm.rank,)}, {"rows": (0 if comm.rank else 1,)}, {"library": library}):
            try:
                vpa.calibrate(comm, [head], **arguments)
            except (TypeError, ValueError) as error:
                sys.stdout.write(f"refused: {error}\\n")
        """
        done = ranks(2, program(body), timeout=60)
        assert done.returncode == 0 and done.stdout.count("refused: ") == 6, done.stderr
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

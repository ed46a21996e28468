"""The cost model: it finds the coefficients of times that it made, says how it errs, and predicts what it should."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import row

from vpa import predict, record, report
from vpa.bench import cost_model
from vpa.bench.break_even import AGAIN, FULL, GATHER_CANDIDATES, GATHER_LOGITS, LOCAL, PRODUCT
from vpa.bench.cost_model import FITTED, MOST_ROWS, TERMS, Case, Model, Observation, fit, held_out
from vpa.bench.links import LINKS

#: Made up: a slow fixed part of the local argmax, so that there is a crossover.
TRUE = Model((4.0, 1.2, 1 / 300e3, 1 / 4e6, 1 / 400e6, 1.5, 1.5, 1 / 3e6, 60.0, 1 / 2e6))
SIZES = (1, 4, 16, 64, 256, 1024)


def case(rows: int = 1, tp: int = 4, **more) -> Case:
    given = {"vocab": 154880, "hidden_size": 6144, "dtype": "bfloat16", "multiprocessors": 132, **more}
    return Case.planned(rows, given.pop("vocab"), tp, **given)


def observed(noise: float = 0.0, tps: tuple[int, ...] = (2, 4)) -> list[Observation]:
    rng = np.random.default_rng(0)
    cases = [case(rows, tp) for tp in tps for rows in SIZES]
    return [Observation(arm, one, TRUE.us(arm, one) * (1 + noise * rng.normal())) for one in cases for arm in FITTED]


def test_the_coefficients_of_exact_times_are_found():
    assert fit(observed()).coefficients == pytest.approx(TRUE.coefficients, rel=1e-3)


def test_exact_times_of_one_tp_are_met_though_steps_and_base_cannot_be_told_apart():
    found = fit(observed(tps=(4,)))
    assert found.coefficients[1] == 0 == found.coefficients[6]
    assert found.coefficients[0] == pytest.approx(3 * 1.2 + 4, rel=1e-3)
    assert found.coefficients[5] == pytest.approx(1.5 + 4 * 1.5, rel=1e-3)
    for one in observed(tps=(4,)):
        assert found.us(one.arm, one.case) == pytest.approx(one.us, rel=1e-3)


def test_noise_is_the_error_on_points_not_seen():
    errors = [abs(one.error) for one in held_out(observed(0.05))]
    assert len(errors) == 2 * 2 * len(SIZES) and 0.01 < np.median(errors) < 0.1
    assert max(abs(one.error) for one in held_out(observed(), "tp")) < 0.12
    assert held_out(observed(tps=(4,)), "tp") == [] == held_out(observed(), "shape")


def test_a_shape_is_predicted_by_fits_to_others():
    halved = [dataclasses.replace(one.case, vocab=77440, columns=one.case.columns // 2) for one in observed()]
    times = observed() + [dataclasses.replace(one, case=other) for one, other in zip(observed(), halved, strict=True)]
    unseen = held_out(times, "shape")
    assert {one.left_out for one in unseen} == {f"vocabulary {one.case.vocab}" for one in times}
    for one in unseen:
        others = [other for other in times if other.case.vocab != one.observation.case.vocab]
        assert one.predicted == fit(others).us(one.observation.arm, one.observation.case)


def test_a_point_is_predicted_without_being_seen():
    """An outlier is not met by the fit that left its size out."""
    times = observed()
    worst = next(i for i, one in enumerate(times) if one.arm == FULL and one.case.rows == 16)
    times[worst] = dataclasses.replace(times[worst], us=3 * times[worst].us)
    errors = {(one.left_out, one.observation.us): one.error for one in held_out(times) if one.observation.arm == FULL}
    assert errors["16 rows", times[worst].us] == pytest.approx(1 / 3 - 1, abs=0.01)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_least_squares_without_negative_coefficients(seed, columns):
    """The conditions of Karush, Kuhn and Tucker, which only the solution meets."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(8, columns)), rng.normal(size=8)
    found = cost_model._non_negative(matrix, target)
    gradient = matrix.T @ (matrix @ found - target)
    assert (found >= 0).all() and (gradient > -1e-6).all() and abs(gradient @ found) < 1e-6


def test_columns_that_say_nothing_or_the_same_are_no_matter():
    matrix = np.array([[1.0, 0.0, 1.0], [2.0, 0.0, 2.0]])
    assert cost_model._non_negative(matrix, np.array([3.0, 6.0])) == pytest.approx([3, 0, 0])


@pytest.mark.parametrize("tp", [2, 8, 64])
def test_the_crossover_is_where_the_times_cross(tp):
    one = case(tp=tp)
    rows = TRUE.crossover(one)
    saved = {n: TRUE.us(FULL, at) - TRUE.us(LOCAL, at) for n in (1, 512) for at in [dataclasses.replace(one, rows=n)]}
    if rows == 0:
        assert saved[1] > 0
        return
    before, at = (dataclasses.replace(one, rows=int(rows) - less) for less in (1, 0))
    assert TRUE.us(FULL, before) <= TRUE.us(LOCAL, before) and TRUE.us(FULL, at) > TRUE.us(LOCAL, at)


def test_crossovers_that_are_not_there():
    never = dataclasses.replace(TRUE, coefficients=(*TRUE.coefficients[:8], 1e9, 0))
    assert never.crossover(case()) == np.inf
    always = dataclasses.replace(TRUE, coefficients=(*TRUE.coefficients[:8], 0, 0))
    assert always.crossover(case()) == 0
    assert predict._rows_words(np.inf) == f"none up to {MOST_ROWS}" and predict._rows_words(0.0) == "1"


def test_slower_links_and_wider_logits_make_the_local_argmax_pay_earlier():
    crossovers = [TRUE.over(LINKS[name]).crossover(case(tp=2)) for name in ("nvlink5", "nvlink4", "ib-ndr", "eth-100")]
    assert crossovers == sorted(crossovers, reverse=True) and crossovers[0] > crossovers[-1] > 0
    assert TRUE.crossover(case(tp=2, dtype="float32")) < TRUE.crossover(case(tp=2))


def test_another_link_reaches_the_same_share_of_its_peak():
    own = LINKS["nvlink4"]
    same = TRUE.over(own, own)
    assert same.coefficients == pytest.approx(TRUE.coefficients)
    network = TRUE.over(LINKS["ib-ndr"], own).coefficients
    assert network[2] == pytest.approx(1 / (300 / 450 * 50e3)) and network[1] == pytest.approx(1.2 + 2.7 - 0.6)
    for rails, bandwidth in ((8, 8 * 300 / 450 * 50e3), (16, 300e3)):  # within a machine no faster than measured
        assert TRUE.over(LINKS["ib-ndr"], own, rails).coefficients[2] == pytest.approx(1 / bandwidth)
    assert TRUE.over(LINKS["ib-ndr"]).coefficients[1:3] == pytest.approx((1.2 + 2.7, 1 / 50e3))


def test_a_gather_s_time_follows_the_formula_of_a_ring():
    for tp, rows in itertools.product((2, 3, 8), (1, 100)):
        one = case(rows, tp)
        n = rows * one.columns * 2
        assert TRUE.us(GATHER_LOGITS, one) == pytest.approx(4 + (tp - 1) * 1.2 + (tp - 1) * n / 300e3)
        assert TRUE.us(FULL, one) > TRUE.us(GATHER_LOGITS, one) + TRUE.us(PRODUCT, one)


@pytest.mark.mpi
def test_candidates_are_counted_as_a_run_moves_them(ranks, tmp_path):
    path = tmp_path / "out.json"
    arguments = ["-m", "vpa.run", "break-even", "--rows", "2,8", "--vocab", "500", "--json", path]
    assert ranks(2, arguments, timeout=60).returncode == 0
    for one in record.read(path)["rows"]:
        if one["samples_us"] and one["arm"] in (GATHER_LOGITS, GATHER_CANDIDATES):
            features = cost_model.case_of(one, 0).features(one["arm"])
            assert features[2] * one["tp"] / (one["tp"] - 1) == one["bytes_moved"]
    assert predict.main([str(path)]) == 0


def test_links_are_published_figures_with_sources():
    for name, link in LINKS.items():
        assert name == link.name and link.source and 10e3 < link.bytes_per_us < 1e6 and 0 < link.step_us < 10


def written(
    path, noise: float = 0.02, mode: str = "captured", tp: int = 4, transport: str = "nccl", reason: str = "", **gpu
) -> str:
    """A record of made-up times of an imagined GPU."""
    rng, rows = np.random.default_rng(1), []
    for size in SIZES:
        for arm in (*FITTED, AGAIN):
            us = TRUE.us(LOCAL if arm == AGAIN else arm, case(size, tp))
            samples = [us * (1 + noise * rng.normal()) for _ in range(5)]
            made = row(size, arm, 9.0, input="made-up", vocab=154880, columns=case(1, tp).columns, tp=tp)
            made |= {"gather": "included", "mode": mode, "samples_us": samples, "median_us": float(np.median(samples))}
            rows.append({**made, "hidden_size": 6144})
    env = {**record.environment(), "transport": transport, "reason": reason}
    env["ranks"] = [{**env["ranks"][0], "gpu": {"name": "imagined", "multiprocessors": 132, **gpu}}] * tp
    return record.write(str(path), "break-even", env, rows)


def test_the_command_says_how_it_errs_and_what_it_predicts(tmp_path, capsys):
    paths = [written(tmp_path / f"{tp}.json", tp=tp) for tp in (2, 4)]
    asked = [
        "--tp",
        "4,16",
        "--link",
        "measured,ib-ndr,nvlink5",
        "--shape",
        "deepseek-v3,100x5000",
        "--dtype",
        "bf16,fp32",
    ]
    assert predict.main([*paths, *asked, "--measured-over", "nvlink4"]) == 0
    printed = capsys.readouterr().out
    for term, _ in TERMS:
        assert f"| {term} |" in printed
    assert (
        "| one batch size | full gather | 12 |" in printed and "| one number of ranks | local argmax | 12 |" in printed
    )
    assert "| one number of ranks | saved, of the full gather | 12 |" in printed
    assert printed.count("| made-up | bfloat16 | 154880 |") == 2
    lines = [line.split(" | ")[:4] for line in printed.splitlines() if line.startswith(("| deepseek", "| 100x"))]
    by_tp = {4: ["as measured", "nvlink5"], 16: ["as measured", "ib-ndr x 8", "nvlink5"]}
    assert [(line[2], line[3]) for line in lines] == [(str(tp), link) for tp in by_tp for link in by_tp[tp]] * 4


def test_times_of_ranks_that_shared_a_gpu_are_said_to_predict_no_others(tmp_path, capsys):
    path = written(tmp_path / "a.json", tp=2)
    assert predict.main([path]) == 0 and "Ranks shared a GPU" not in capsys.readouterr().out
    shared = written(tmp_path / "b.json", tp=2, reason="2 ranks sharing 1 (times are co-located, not of links)")
    assert predict.main([shared]) == 0 and "Ranks shared a GPU" in capsys.readouterr().out


def test_figures_of_a_study(tmp_path, capsys):
    path, folder = written(tmp_path / "a.json", tp=2), tmp_path / "figures"
    assert report.main([path, "--figures", str(folder)]) == 0
    names = ["a_made-up_tp2_captured.png", "a_made-up_tp2_captured.svg"]
    assert sorted(file.name for file in folder.iterdir()) == names
    drawn = (folder / names[1]).read_text()
    assert "crossover" in drawn and "full gather" in drawn
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "eager"], "no times of mode eager; there are captured"),
        (["--shape", "llama"], "shape 'llama' is not known"),
    ],
)
def test_what_cannot_be_predicted(arguments, message, tmp_path, capsys):
    assert predict.main([written(tmp_path / "a.json"), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--link", "token-ring"], ["--tp", "0"], ["--dtype", "fp64"], ["--tp", "x"], ["--node", "0"], ["--rails", "1,2"]],
)
def test_bad_usage(arguments, tmp_path):
    with pytest.raises(SystemExit) as ended:
        predict.main([written(tmp_path / "a.json"), *arguments])
    assert ended.value.code == 2


def test_records_that_do_not_go_together(tmp_path, capsys):
    paths = [written(tmp_path / "a.json"), written(tmp_path / "b.json", name="another")]
    assert predict.main(paths) == 2
    assert "the records are of another, imagined; records alike in that" in capsys.readouterr().err
    assert predict.main([paths[0], written(tmp_path / "c.json", transport="mpi")]) == 2
    assert "the records are over mpi, nccl; records alike in that" in capsys.readouterr().err
    shared = written(tmp_path / "d.json", reason="4 ranks sharing 1 (times are co-located, not of links)")
    assert predict.main([paths[0], shared]) == 2
    assert "the records are of ranks that shared a GPU, shared none; records alike" in capsys.readouterr().err
    for name in ("headline_h200", "draft_h200_nvlink_2"):
        assert predict.main([f"mpi_runs/results/{name}.json"]) == 2
        assert "no times of both ways in pairs; a record of break-even is accepted" in capsys.readouterr().err


def test_a_shape_without_a_hidden_size_is_refused_where_products_are_predicted(tmp_path, capsys):
    assert predict.main([written(tmp_path / "a.json"), "--shape", "deepseek-v3,minimax-m3"]) == 2
    assert "the hidden size of minimax-m3 is not known; name HIDDENxVOCAB instead" in capsys.readouterr().err


def test_the_difference_counts_in_a_fit():
    """Local argmaxes that all take 30 % longer than any model can say: the difference is not given up for that."""
    times = [dataclasses.replace(one, us=one.us * (1.3 if one.arm == PRODUCT else 1.0)) for one in observed()]
    found = fit(times)
    for full, local in cost_model._pairs(times):
        saved = found.us(FULL, full.case) - found.us(LOCAL, full.case)
        assert abs(saved - full.us + local.us) < 0.06 * full.us
    errors = cost_model.saved_errors(held_out(times))
    assert len(errors) == 2 * len(SIZES) and np.median([abs(error) for error, _ in errors]) < 0.05

"""What the report says of the sites: how sure a sensitivity is, other draws, groups, what is undecided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from changed_run import with_profile

from loka_onnx.core.profile import ENTROPY, Draws, Profile, Sampling, Sensitivity
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.report import ReportData, numbers
from loka_onnx.report.document import Section
from loka_onnx.report.histograms import activations
from loka_onnx.report.site_tables import calibration_facts, open_sites, sites_section


def with_sensitivities(data: ReportData, change: Callable[[Sensitivity], Sensitivity]) -> ReportData:
    sites = tuple(
        dataclasses.replace(entry, sensitivities=tuple(map(change, entry.sensitivities)))
        for entry in data.profile.sites
    )
    return with_profile(data, sites=sites)


def column(section: Section, title: str) -> list[str]:
    """Texts of a column of the table of sites."""
    (table,) = (t for t in section.tables if t.caption.startswith("Sites in plan"))
    titles = [c.title for c in table.columns]
    return [row[titles.index(title)].text for row in table.rows]


def test_kl_and_the_labelled_part_stand_apart_with_their_intervals(sample) -> None:
    section = sites_section(sample.report)
    kl, labelled = column(section, "KL"), column(section, "Labelled")
    # 1.96 standard errors of 5e-7 and 4e-5 (t with 1999 degrees of freedom).
    assert kl[:2] == ["+0.001200 % [+0.001102 %, +0.001298 %]"] * 2
    assert labelled[:2] == ["-0.0003 % [-0.0081 %, +0.0075 %]"] * 2
    assert kl[2] == labelled[2] == numbers.NOT_MEASURED
    assert column(section, "Rows measured") == ["2,000", "2,000", numbers.NONE]
    assert "both relative to the loss, for this site alone" in section.paragraphs[-3]
    assert section.paragraphs[-1].startswith("Each interval holds with 95 %. It says nothing of other draws")


def test_a_kept_site_shows_the_recipe_that_its_verdict_is_of(sample) -> None:
    """Errors are measured under several recipes, effects under the one that a plan would use."""
    (first, second), plan = sample.report.profile.sites, sample.report.plan("fp8-safe")
    (error,), (sensitivity,) = second.errors, second.sensitivities
    assert plan.decision(second.site).recipe is None
    best = PER_CHANNEL_WEIGHT.id
    entry = dataclasses.replace(
        second,
        errors=(error, dataclasses.replace(error, recipe=best, count=2000)),
        sensitivities=(dataclasses.replace(sensitivity, recipe=best),),
    )
    data = with_profile(sample.report, sites=(first, entry))
    section = sites_section(data)
    assert column(section, "Recipe measured")[:2] == [PER_TENSOR.id, best]
    assert column(section, "KL")[1] == "+0.001200 % [+0.001102 %, +0.001298 %]"
    assert column(section, "Rows measured")[1] == "2,000"
    drawn = {found.site: found for found in activations(data, plan)}
    assert drawn[second.site].recipe == PER_CHANNEL_WEIGHT
    assert drawn[second.site].error == entry.errors[1]


def test_where_rows_were_added_until_verdicts_were_reached_intervals_are_wider(sample) -> None:
    sampling = Sampling(2000, 1, 16384, may_stop_early=True)
    section = sites_section(with_profile(sample.report, sampling=sampling))
    interval = sample.report.profile.sites[0].sensitivities[0].kl_moments.anytime_interval(16384)
    assert interval.upper > 1.35e-5
    assert column(section, "KL")[0] == numbers.percent_interval(interval)
    assert "holds with 95 % at every number of rows at once" in section.paragraphs[-1]


def test_the_spread_over_draws(sample) -> None:
    draws = Draws(4, 1.1e-5, 1.9e-5, 1.5, -1e-5, 2e-5)
    data = with_sensitivities(sample.report, lambda s: dataclasses.replace(s, draws=draws))
    assert column(sites_section(data), "KL over draws")[0] == "0.0011 % to 0.0019 % (4)"
    assert column(sites_section(sample.report), "KL over draws")[0] == numbers.NONE


def test_without_labels_the_denominator_is_named_and_the_labelled_part_is_not_there(sample) -> None:
    data = with_sensitivities(
        sample.report,
        lambda s: dataclasses.replace(s, denominator=ENTROPY, labelled_moments=None, labelled=None),
    )
    section = sites_section(data)
    assert "relative to the mean entropy of the predictions (no labels)" in " ".join(section.paragraphs)
    assert column(section, "Labelled")[0] == numbers.NONE


def test_sites_that_stayed_undecided_are_named(sample) -> None:
    sampling = Sampling(2000, 3, 16384, ("over_arch.fc0", "over_arch.fc1"), may_stop_early=True)
    data = with_profile(sample.report, sampling=sampling)
    said = (
        "Undecided when the rows ended, after 2,000: over_arch.fc0, over_arch.fc1. More rows may decide them"
    )
    assert open_sites(data.profile) == [said] == list(sites_section(data).items)
    assert open_sites(sample.report.profile) == []


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, ["Ranges: 4,000 rows; errors: 4,000 rows; sensitivities: 2,000 rows"]),
        (
            {"sampling": Sampling(1024, 2, 16384, may_stop_early=True), "error_rows": 512},
            [
                "Ranges: 4,000 rows; errors: 512 rows; sensitivities: 1,024 rows",
                "Sensitivities stopped where the verdict of every site was reached",
            ],
        ),
        (
            {
                "data_digest": "a" * 64 + "+" + "b" * 64,
                "sampling": Sampling(4000, 3, 16384, ("x",), may_stop_early=True),
            },
            [
                "Ranges: 4,000 rows; errors: 4,000 rows; sensitivities: 4,000 rows",
                "Calibration rows were added to those of the split: digest bbbbbbbbbbbbbbbb",
            ],
        ),
    ],
)
def test_the_rows_that_were_looked_at(sample, changes: dict[str, object], facts: list[str]) -> None:
    profile: Profile = dataclasses.replace(sample.report.profile, **changes)
    assert calibration_facts(profile) == facts

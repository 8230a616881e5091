"""Remedies for ranks that do not fit are reported with their gain, and suffice."""

from __future__ import annotations

import pytest

from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.plan.fitting import Misfit, card_needed, changed, misfits
from mtpctl.plan.memory import GIB, trainer_memory
from mtpctl.recipe.checks import complaints_of
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from tests.fakes.fits import check_fits

MIMO = shape_of(hub_config("XiaomiMiMo/MiMo-7B-RL"))
ONE_CARD = "train.parallel={tp: 1}"


def recipe(*sets: str) -> Recipe:
    return load_recipe("mimo7b_mtp", sets=sets).recipe


def only(created: Recipe) -> Misfit:
    (misfit,) = misfits(created, MIMO)
    return misfit


def test_the_gain_of_a_remedy_is_the_reduction_of_the_memory() -> None:
    created = recipe(ONE_CARD)
    needs = trainer_memory(created, MIMO).total
    for remedy in only(created).remedies:
        assert remedy.gain == needs - trainer_memory(changed(created, remedy.change), MIMO).total > 0
        assert remedy.fits == (needs - remedy.gain <= 139 * GIB)


def test_the_error_names_a_sufficient_remedy_without_more_cards() -> None:
    misfit = only(recipe("cluster.gpu_gib=40", "rollout.gpu_memory=0.9"))
    gains = [remedy.gain for remedy in misfit.remedies]
    assert gains == sorted(gains, reverse=True) and len(gains) >= 6
    assert misfit.remedies[0].cards, "tp=8 gains most, on twice as many cards"
    enough = next(remedy for remedy in misfit.remedies if remedy.fits and not remedy.cards)
    assert str(misfit.error).endswith(f"set {enough}, which gains {enough.gain / GIB:.1f} GiB")


def test_remedies_pass_the_recipes_checks_and_report_further_cards() -> None:
    sets = {str(remedy): remedy for remedy in only(recipe(ONE_CARD)).remedies}
    for text, remedy in sets.items():
        created = recipe(ONE_CARD, *text.split())
        assert not list(complaints_of(created)) and created == changed(recipe(ONE_CARD), remedy.change)
    assert sets["train.parallel.tp=2 train.parallel.sequence_parallel=true"].cards
    assert not sets["train.recompute=full"].cards and not sets["train.offload.optimizer=true"].cards


@pytest.mark.parametrize("card", [90, 60, 50])
def test_remedies_are_combined_if_no_single_one_suffices(card: int) -> None:
    created = recipe(ONE_CARD, f"cluster.gpu_gib={card}", "rollout.gpu_memory=0.5")
    misfit = only(created)
    assert not any(remedy.fits for remedy in misfit.remedies) and len(misfit.together) > 1
    for remedy in misfit.together:
        created = changed(created, remedy.change)
    check_fits(created, MIMO)


def test_remedies_of_an_engine_are_a_larger_share_or_two_ranks() -> None:
    misfit = only(recipe("rollout.gpu_memory=0.1"))
    assert {"rollout.tp=2": True, "rollout.gpu_memory=0.12": True}.items() <= {str(r): r.fits for r in misfit.remedies}.items()
    for text in ("rollout.gpu_memory=0.12", "rollout.tp=2"):
        check_fits(recipe("rollout.gpu_memory=0.1", text), MIMO)


def test_remedies_of_a_cache_in_bytes_are_sizes_that_fit() -> None:
    for requested in (1 << 20, 128 * GIB):
        created = recipe(f"rollout.kv_cache_bytes={requested}")
        remedy = next(remedy for remedy in only(created).remedies if "rollout.kv_cache_bytes" in remedy.change)
        assert remedy.fits
        check_fits(changed(created, remedy.change), MIMO)


def test_remedies_of_a_log_prob_rank_and_a_shared_card_are_shares() -> None:
    shares = ["logprob.gpus=0.1", "rollout.gpu_memory=0.8"]
    remedy = next(remedy for remedy in only(recipe(*shares)).remedies if "logprob.gpus" in remedy.change)
    assert remedy.fits and remedy.change["logprob.gpus"] == 0.14
    shared = only(recipe("logprob.gpus=0.3", "rollout.gpu_memory=0.8"))
    assert (shared.rank, str(shared.remedies[0]), shared.remedies[0].fits) == ("shared_card", "rollout.gpu_memory=0.7", True)


def test_card_needed_is_the_smallest_card_that_fits() -> None:
    for sets in ([ONE_CARD], ["logprob.gpus=0.1"], ["rollout.gpu_memory=0.1"]):
        created = recipe(*sets, "cluster.gpu_gib=null")
        needed = card_needed(created, MIMO)
        assert not list(misfits(changed(created, {"cluster.gpu_gib": needed * 1.001}), MIMO))
        assert list(misfits(changed(created, {"cluster.gpu_gib": needed * 0.99}), MIMO))


def test_an_engine_without_room_on_the_trainers_card_is_an_error_that_a_remedy_resolves() -> None:
    """MiMo-7B's trainer on four ranks leaves a tenth of each card, which does not hold the engine's weights."""
    sets = ["train.gpus=0.9", "rollout.on_trainer_gpus=1", "logprob.standalone=false", "sync.transport=ipc"]
    misfit = only(recipe(*sets))
    assert misfit.rank == "rollout_rank_on_trainer_gpu"
    assert str(misfit.error).startswith("rollout.on_trainer_gpus: 13.2 GiB of the card do not hold ")
    assert str(misfit.error).endswith("; lower train.gpus, or set on_trainer_gpus: 0")
    remedies = {str(remedy): remedy for remedy in misfit.remedies}
    assert remedies["rollout.on_trainer_gpus=0"].fits and remedies["rollout.on_trainer_gpus=0"].cards
    for text, remedy in remedies.items():
        if remedy.fits:
            check_fits(recipe(*sets, *text.split()), MIMO)

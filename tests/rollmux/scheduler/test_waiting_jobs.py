"""Jobs on named nodes: who waits, who overtakes, whose share it is, and nodes that come and go."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cluster_worlds import job, run_on
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scheduler_world import World, reborn

from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.cluster import HORIZON, Job
from rollpacker.rollmux.model.inventory import FLAPS, Fixed, Machine, Needs
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.settings import Settings, Team
from rollpacker.rollmux.record.trace import Philly, philly
from rollpacker.rollmux.scheduler.queue import TRIED, why_it_waits
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.cluster_sim import ClusterSimulation

TEAMS = (Team(name="a", rollout=3, train=3), Team(name="b", rollout=2, train=2))
SCARCE = Settings(margin=0.08, nodes="named")


def machines(rollout: int, train: int, **more: object) -> list[Machine]:
    pools = ["rollout"] * rollout + ["train"] * train
    return [Machine(name=f"{pool}{n}", pool=pool, **more) for n, pool in enumerate(pools)]


def scheduler(rollout: int, train: int, how: Settings = SCARCE) -> Scheduler:
    return Scheduler(how, Fixed(machines(rollout, train)))


def spec(name: str, gang: int = 1, **more: object) -> JobSpec:
    """Nobody shares with it: it may not be slowed down."""
    given = {"slo": 1.0, "worst_rollout_s": 100.0, "worst_train_s": 50.0} | more
    return JobSpec(id=name, rollout_nodes=gang, train_nodes=gang, **given)


def arrive(to: Scheduler, now: float, *specs: JobSpec) -> list[do.Decision]:
    return [made for each in specs for made in to.handle(now, ev.JobArrived(spec=each))]


def placed(made: list[do.Decision]) -> list[str]:
    return [each.job for each in made if isinstance(each, do.Place)]


@settings(max_examples=settings().max_examples // 4, phases=[Phase.generate])
@given(data=st.data())
def test_invariants_hold_on_named_nodes(data: st.DataObject) -> None:
    world = World(Scheduler(replace(SCARCE, teams=TEAMS), Fixed(machines(5, 5))))
    for _ in range(80):
        world.step(data)
    for name in list(world.scheduler.cluster.jobs):
        world.end(name)
    assert not world.held
    assert not world.scheduler.cluster.groups
    assert not world.scheduler.queue.jobs
    assert world.scheduler.cluster.reservation is None


@settings(max_examples=settings().max_examples // 12, phases=[Phase.generate])
@given(data=st.data())
def test_a_restart_on_named_nodes_goes_on_as_if_nothing_had_happened(data: st.DataObject) -> None:
    how = replace(SCARCE, teams=TEAMS)
    straight, restarted = (Scheduler(how, Fixed(machines(4, 4))) for _ in range(2))

    class Both(Scheduler):
        def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
            nonlocal restarted
            restarted = reborn(restarted)
            made = straight.handle(now, event)
            assert restarted.handle(now, event) == made
            assert restarted.next_look() == straight.next_look()
            return made

    world = World(Both(how))
    world.scheduler.cluster = straight.cluster
    world.scheduler.next_look = straight.next_look
    for _ in range(40):
        world.step(data)


def test_who_does_not_fit_waits_and_starts_when_there_is_room() -> None:
    on = scheduler(2, 2)
    assert placed(arrive(on, 0.0, spec("one", 2))) == ["one"]
    assert arrive(on, 1.0, spec("two")) == [do.Wait(job="two")]
    made = on.handle(50.0, ev.JobEnded(job="one"))
    assert placed(made) == ["two"]
    # Its promise begins with its admission.
    assert on.cluster.jobs["two"].started == 50.0
    assert on.cluster.jobs["two"].submitted == 1.0


def test_a_cloud_with_a_limit_lets_jobs_wait_too() -> None:
    on = Scheduler(Settings(limit=(1, None)))
    assert placed(arrive(on, 0.0, spec("one"))) == ["one"]
    assert arrive(on, 1.0, spec("two")) == [do.Wait(job="two")]
    with pytest.raises(ValueError, match="needs 2 rollout nodes, but there are 1"):
        arrive(on, 2.0, spec("three", 2))
    assert placed(on.handle(50.0, ev.JobEnded(job="one"))) == ["two"]


def test_by_option_waiting_uses_the_promise_up() -> None:
    on = scheduler(1, 1)
    arrive(on, 0.0, spec("one"))
    arrive(on, 1.0, spec("two", slo_since="submission"))
    on.handle(50.0, ev.JobEnded(job="one"))
    assert on.cluster.jobs["two"].started == 1.0


def test_what_never_fits_is_refused_or_waits_by_option() -> None:
    on = scheduler(4, 4)
    with pytest.raises(ValueError, match=r"^job big: needs 500 rollout nodes, but there are 4$"):
        arrive(on, 0.0, spec("big", 500))
    assert "big" not in on.cluster.jobs
    assert arrive(on, 0.0, spec("big", 5, too_large="wait")) == [do.Wait(job="big")]
    # It holds nobody up.
    assert placed(arrive(on, 1.0, spec("small"))) == ["small"]
    on.handle(2.0, ev.JobEnded(job="small"))
    for number, pool in enumerate(("rollout", "train")):
        made = on.handle(3.0 + number, ev.NodeJoined(machine=Machine(name=pool, pool=pool)))
    assert placed(made) == ["big"]


def test_memory_devices_and_labels_are_those_of_the_machine() -> None:
    some = [*machines(2, 2, memory_gb=500.0, devices=4), *machines(0, 0)]
    some.append(Machine(name="large", pool="rollout", memory_gb=2000.0, labels={"gpu": "h20"}))
    on = Scheduler(SCARCE, Fixed(some))
    with pytest.raises(ValueError, match="needs more host memory than any train node has: 900 GB"):
        arrive(on, 0.0, spec("a", train_memory_gb=900.0))
    with pytest.raises(ValueError, match="needs 1 rollout nodes with gpu=h100, but there are 0"):
        arrive(on, 0.0, spec("b", rollout_labels={"gpu": "h100"}))
    with pytest.raises(ValueError, match="needs 1 train nodes of 8 devices, but there are 0"):
        arrive(on, 0.0, spec("c", node_devices=8))
    place = next(
        each
        for each in arrive(on, 0.0, spec("d", rollout_memory_gb=1800.0))
        if isinstance(each, do.Place)
    )
    assert place.rollout == ("large",)


def test_a_later_job_overtakes_if_the_first_one_starts_no_later_for_it() -> None:
    on = scheduler(4, 4)
    arrive(on, 0.0, spec("long", 3, iterations=100))
    assert arrive(on, 1.0, spec("first", 4)) == [do.Wait(job="first")]
    # Would be there when `long` has left.
    assert arrive(on, 2.0, spec("slow", iterations=1000)) == [do.Wait(job="slow")]
    assert placed(arrive(on, 3.0, spec("quick", iterations=5))) == ["quick"]
    on.handle(4.0, ev.JobEnded(job="quick"))
    assert placed(on.handle(5.0, ev.JobEnded(job="long"))) == ["first"]


def test_without_backfill_nobody_overtakes() -> None:
    on = scheduler(2, 2, replace(SCARCE, backfill=False))
    arrive(on, 0.0, spec("long", iterations=100), spec("first", 2))
    assert placed(arrive(on, 3.0, spec("quick", iterations=5))) == []


def test_priorities_count_inside_a_team_and_patience_ends_it() -> None:
    on = scheduler(1, 1, replace(SCARCE, patience_s=1000.0))
    arrive(on, 0.0, spec("now"))
    arrive(on, 1.0, spec("low"), spec("high", priority=5), spec("other", team="b", priority=9))
    order = [each.spec.id for each in on.queue.waiting(2.0)]
    assert order.index("high") < order.index("low")
    # The team of those has a job running, so the other team is next, whatever its priority.
    assert order[0] == "other"
    on.handle(3.0, ev.JobEnded(job="other"))
    arrive(on, 500.0, spec("higher", priority=9))
    assert [each.spec.id for each in on.queue.waiting(1400.0)] == ["high", "low", "higher"]


def test_what_a_team_is_owed_comes_back_between_two_iterations() -> None:
    on = scheduler(5, 5, replace(SCARCE, teams=TEAMS, repack=False))
    for n in range(5):
        arrive(on, 0.1 * n, spec(f"b{n}", team="b", iterations=1000))
        on.handle(1.0, ev.PermitRequested(job=f"b{n}", phase="rollout"))
    made = arrive(on, 2.0, spec("a0", team="a"), spec("a1", team="a"))
    assert made == [do.Wait(job="a0"), do.Wait(job="a1")]
    leaving = {name for name, each in on.cluster.jobs.items() if each.leaves}
    # The latest ones, and no more than are needed. Nobody is stopped inside an iteration.
    assert leaving == {"b3", "b4"}
    name = "b4"
    token = on.cluster.jobs[name].token
    on.handle(90.0, ev.PhaseFinished(job=name, phase="rollout", seconds=80.0, token=token))
    made = on.handle(91.0, ev.PermitRequested(job=name, phase="train"))
    token = on.cluster.jobs[name].token
    made = on.handle(140.0, ev.PhaseFinished(job=name, phase="train", seconds=40.0, token=token))
    assert any(isinstance(each, do.Suspend) and each.job == name for each in made)
    assert len(placed(made)) == 1
    # Its clock stands still while it waits: it had them for 139.6 s.
    first, second = placed(made)[0], "a1"
    made = on.handle(300.0, ev.JobEnded(job=first))
    assert placed(made) == [second]
    made = on.handle(400.0, ev.JobEnded(job=second))
    assert [(each.job, each.reason) for each in made if isinstance(each, do.Move)] == [
        (name, "resume")
    ]
    assert 400.0 - on.cluster.jobs[name].started == pytest.approx(140.0 - 0.4)


def test_nobody_is_sent_away_for_who_only_borrows() -> None:
    on = scheduler(5, 5, replace(SCARCE, teams=TEAMS))
    arrive(on, 0.0, *[spec(f"b{n}", team="b", iterations=1000) for n in range(5)])
    arrive(on, 2.0, spec("guest"))
    assert not any(each.leaves for each in on.cluster.jobs.values())


@settings(max_examples=settings().max_examples // 12, phases=[Phase.generate])
@given(data=st.data())
def test_teams_that_always_want_more_get_their_shares(data: st.DataObject) -> None:
    """One-node jobs that share with nobody, each team with a queue: guarantees are met, always."""
    on = scheduler(5, 5, replace(SCARCE, teams=TEAMS, repack=False))
    now, count = 0.0, 0
    for _ in range(60):
        now += 10.0
        for team in ("a", "b"):
            while sum(each.spec.team == team for each in on.queue.jobs.values()) < 2:
                count += 1
                arrive(on, now, spec(f"j{count}", team=team, iterations=1000))
        live = [name for name, each in on.cluster.jobs.items() if each.home is not None]
        on.handle(now, ev.JobEnded(job=data.draw(st.sampled_from(sorted(live)))))
    used = {
        team.name: sum(
            each.spec.team == team.name and each.waits_since is None
            for each in on.cluster.jobs.values()
        )
        for team in TEAMS
    }
    assert used == {"a": 3, "b": 2}


@settings(max_examples=settings().max_examples // 12, phases=[Phase.generate])
@given(data=st.data())
def test_nobody_waits_for_ever(data: st.DataObject) -> None:
    """A large job among small ones that keep coming starts within its patience and some jobs."""
    on = scheduler(4, 4, replace(SCARCE, patience_s=3600.0))
    now, count, started = 0.0, 0, None
    arrive(on, now, *[spec(f"first{n}", iterations=20) for n in range(4)])
    arrive(on, now, spec("large", 4))
    while started is None:
        now += 300.0
        assert now < 4 * 3600.0
        count += 1
        length = data.draw(st.sampled_from([4, 20, 40]))
        made = arrive(on, now, spec(f"small{count}", iterations=length))
        over = [
            name
            for name, each in on.cluster.jobs.items()
            if each.home is not None
            and now - each.admitted_at >= 150.0 * (each.spec.iterations or 0)
        ]
        for name in over:
            made += on.handle(now, ev.JobEnded(job=name))
        started = now if "large" in placed(made) else None


def test_a_drained_node_is_left_between_two_iterations_and_a_cordoned_one_is_not() -> None:
    on = scheduler(2, 2)
    arrive(on, 0.0, spec("one", iterations=100))
    home = on.cluster.jobs["one"].home
    assert home is not None
    (node,) = home.nodes[0]
    on.handle(1.0, ev.NodeClosed(node=node, status="cordoned"))
    assert on.cluster.jobs["one"].destination is None
    made = on.handle(2.0, ev.NodeClosed(node=node, status="draining", why="new cables"))
    move = next(each for each in made if isinstance(each, do.Move))
    assert move.reason == "drain"
    assert node not in move.rollout
    assert any(isinstance(each, do.ReleaseNodes) for each in on.handle(3.0, moved("one")))
    with pytest.raises(ValueError, match="jobs are on it, so drain it first"):
        on.handle(4.0, ev.NodeRemoved(node=move.rollout[0]))
    on.handle(5.0, ev.NodeRemoved(node=node))
    with pytest.raises(ValueError, match="no node has this name"):
        on.handle(6.0, ev.NodeOpened(node=node))


def moved(name: str) -> ev.MoveFinished:
    return ev.MoveFinished(job=name)


def test_who_cannot_leave_a_drained_node_yet_leaves_when_there_is_room() -> None:
    on = scheduler(2, 2)
    arrive(on, 0.0, spec("one"), spec("two"))
    home = on.cluster.jobs["one"].home
    assert home is not None
    made = on.handle(1.0, ev.NodeClosed(node=home.nodes[0][0], status="draining"))
    assert not any(isinstance(each, do.Move) for each in made)
    made = on.handle(2.0, ev.JobEnded(job="two"))
    assert [each.reason for each in made if isinstance(each, do.Move)] == ["drain"]


def test_a_node_that_flaps_is_set_aside_until_somebody_opens_it() -> None:
    on = scheduler(1, 1)
    machine = next(iter(on.cluster.inventory.machines))
    for number in range(FLAPS):
        on.handle(100.0 * number, ev.NodeFailed(node=machine.name))
        on.handle(100.0 * number + 50.0, ev.NodeJoined(machine=machine))
    assert arrive(on, 400.0, spec("one")) == [do.Wait(job="one")]
    assert placed(on.handle(500.0, ev.NodeOpened(node=machine.name))) == ["one"]


def test_a_job_whose_node_fails_goes_before_those_that_never_had_one() -> None:
    on = scheduler(2, 2)
    arrive(on, 0.0, spec("one"), spec("two"), spec("three"))
    home = on.cluster.jobs["one"].home
    assert home is not None
    made = on.handle(1.0, ev.NodeFailed(node=home.nodes[0][0]))
    assert do.Wait(job="one") in made
    made = on.handle(2.0, ev.JobEnded(job="two"))
    assert [each.reason for each in made if isinstance(each, do.Move)] == ["failure"]
    # Its promise went on.
    assert on.cluster.jobs["one"].started == 0.0


def test_gangs_come_from_one_rack_where_they_can() -> None:
    some = [
        Machine(name=f"{rack}{n}", pool="rollout", rack=rack)
        for rack, count in (("a", 2), ("b", 3), ("c", 1))
        for n in range(count)
    ]
    fixed = Fixed(some)
    needs = Needs(memory_gb=1.0)
    assert fixed.take(0, 2, needs) == ("a0", "a1")
    assert fixed.take(0, 3, needs) == ("b0", "b1", "b2")
    with pytest.raises(ValueError, match="no 2 rollout nodes are free"):
        fixed.take(0, 2, needs)
    fixed.give(["a0", "b1"])
    assert fixed.take(0, 3, needs) == ("a0", "b1", "c0")


def test_drains_and_failures_in_a_simulation_break_no_rule() -> None:
    jobs = philly(
        Philly(jobs=16, days=0.2, nodes="mixed", mean_hours=1.5), np.random.default_rng(1)
    )
    some = machines(8, 8)
    others: list[tuple[float, ev.Event]] = []
    for number, machine in enumerate(some[::3]):
        at = jobs[0].arrival_s + 3000.0 * (number + 1)
        others.append((at, ev.NodeClosed(node=machine.name, status="draining")))
        others.append((at + 6000.0, ev.NodeOpened(node=machine.name)))
    others.append((jobs[0].arrival_s + 4000.0, ev.NodeFailed(node=some[1].name)))
    others.append((jobs[0].arrival_s + 9000.0, ev.NodeJoined(machine=some[1])))
    how = replace(SCARCE, teams=(Team(name="others", rollout=4, train=4),))
    result, violations = run_on(jobs, Scheduler(how, Fixed(some)), others)
    assert [each for each in violations if each.rule != "slo"] == []
    assert len(result.jobs) == 16


def test_one_job_alone_on_its_nodes_is_as_fast_as_ever() -> None:
    only = [job("a", [60.0] * 5, [20.0] * 5)]
    result, violations = run_on(only, scheduler(1, 1))
    assert violations == []
    assert result.jobs[0].slowdown == pytest.approx(1.0)
    assert ClusterSimulation(only, scheduler(1, 1)).run().nodes == (1, 1)


def test_plans_count_on_few_of_the_iterations_that_are_only_expected() -> None:
    """A run that stops early must not have spent slack that never came."""
    made = {
        key: [Job(spec("a", **{key: 100}), 0.0, done=done).remaining() for done in (0, 95, 500)]
        for key in ("iterations", "expected_iterations")
    }
    assert made == {"iterations": [100, 5, 1], "expected_iterations": [HORIZON, 5, HORIZON]}
    assert Job(spec("a"), 0.0).remaining() == HORIZON


@pytest.mark.parametrize("about", [{}, {"expected_iterations": 10}], ids=str)
def test_one_that_goes_on_longer_than_expected_keeps_no_nodes_free(about: dict[str, int]) -> None:
    to = scheduler(2, 2)
    arrive(to, 0.0, spec("a", **about))
    to.cluster.jobs["a"].done = 500
    arrive(to, 1.0, spec("wide", 2, iterations=20))
    arrive(to, 2.0, spec("mid", iterations=30))
    assert list(to.queue.jobs) == ["wide"]


@pytest.mark.parametrize(("about", "waits"), [("iterations", False), ("expected_iterations", True)])
def test_only_who_is_sure_to_be_over_in_time_overtakes(about: str, waits: bool) -> None:
    to = scheduler(2, 2)
    arrive(to, 0.0, spec("a", iterations=40), spec("wide", 2, iterations=20))
    arrive(to, 5.0, spec("late", **{about: 1}))
    assert ("late" in to.queue.jobs) == waits


def programs(to: Scheduler, name: str, *members: bool) -> list[do.Decision]:
    """A job whose driver agents start, and with ``members`` processes on its other nodes."""
    return to.handle(0.0, ev.JobArrived(spec=spec(name), programs=(True, any(members))))


def heard(on: Scheduler, node: str, starts: bool = True) -> list[do.Decision]:
    return on.handle(1.0, ev.AgentHeard(node=node, programs=starts))


def test_programs_come_to_nodes_whose_agents_start_some() -> None:
    on = scheduler(3, 1)
    assert programs(on, "a") == [do.Wait(job="a")]
    text = why_it_waits(on.cluster, on.cluster.jobs["a"])
    assert text == (
        "it needs 1 rollout node (0 free, 3 without an agent) of its own; no agent that starts "
        "programs was heard on rollout0, rollout1, rollout2: rollpacker mux agent --node "
        "rollout0 --programs FOLDER"
    )
    assert heard(on, "rollout1", starts=False) == []
    assert placed(heard(on, "rollout2")) == ["a"]
    home = on.cluster.jobs["a"].home
    assert home is not None
    assert home.nodes == (("rollout2",), ("train3",))


def test_what_no_agent_starts_needs_none_and_prefers_nodes_that_were_heard() -> None:
    on = scheduler(2, 1)
    heard(on, "rollout1", starts=False)
    assert placed(arrive(on, 0.0, spec("driven"))) == ["driven"]
    home = on.cluster.jobs["driven"].home
    assert home is not None
    assert home.nodes[0] == ("rollout1",)


def test_processes_on_every_node_need_an_agent_on_every_node() -> None:
    on = scheduler(1, 1)
    heard(on, "rollout0")
    assert programs(on, "a", True) == [do.Wait(job="a")]
    assert "was heard on train1:" in why_it_waits(on.cluster, on.cluster.jobs["a"])
    assert placed(heard(on, "train1")) == ["a"]


@pytest.mark.parametrize("how", ["failure", "drain"])
def test_nobody_is_sent_from_an_agent_to_a_node_without_one(how: str) -> None:
    on = scheduler(2, 1)
    heard(on, "rollout0")
    programs(on, "a")
    event = ev.NodeFailed if how == "failure" else partial(ev.NodeClosed, status="draining")
    made = on.handle(2.0, event(node="rollout0"))
    job = on.cluster.jobs["a"]
    assert not any(isinstance(each, do.Move) for each in made)
    # A drained job goes on where it is, a job whose node failed waits.
    assert (job.waits_since is None) == (how == "drain")
    (move,) = [each for each in heard(on, "rollout1") if isinstance(each, do.Move)]
    assert (move.reason, move.rollout) == (how, ("rollout1",))


def iterate(on: Scheduler, now: float, name: str) -> list[do.Decision]:
    """A whole iteration; what its end leads to."""
    made: list[do.Decision] = []
    for phase in ("rollout", "train"):
        asked = on.handle(now, ev.PermitRequested(job=name, phase=phase))
        (permit,) = [each for each in asked if isinstance(each, do.Permit)]
        over = ev.PhaseFinished(job=name, phase=phase, seconds=9.0, token=permit.token)
        made = on.handle(now, over)
    return made


def test_a_held_job_finishes_its_iteration_and_others_have_its_nodes() -> None:
    on = scheduler(1, 1)
    arrive(on, 0.0, spec("a"), spec("b"), spec("c"))
    on.handle(1.0, ev.PermitRequested(job="a", phase="rollout"))
    token = on.cluster.jobs["a"].token
    for name in ("a", "b"):
        assert on.handle(2.0, ev.JobChanged(job=name, held=True)) == []
    on.handle(3.0, ev.PhaseFinished(job="a", phase="rollout", seconds=2.0, token=token))
    on.handle(4.0, ev.PermitRequested(job="a", phase="train"))
    token = on.cluster.jobs["a"].token
    made = on.handle(5.0, ev.PhaseFinished(job="a", phase="train", seconds=1.0, token=token))
    assert [each.job for each in made if isinstance(each, do.Suspend)] == ["a"]
    # b came first, and is held.
    assert placed(made) == ["c"]
    assert on.cluster.jobs["a"].done == 1
    on.handle(6.0, ev.JobEnded(job="c"))
    made = on.handle(106.0, ev.JobChanged(job="a", held=False))
    (move,) = [each for each in made if isinstance(each, do.Move)]
    assert (move.job, move.reason) == ("a", "resume")
    # Its promise does not count the time for which it was held.
    assert on.cluster.jobs["a"].started == pytest.approx(101.0)


def test_a_job_that_is_released_in_time_keeps_its_nodes() -> None:
    on = scheduler(1, 1)
    arrive(on, 0.0, spec("a"))
    on.handle(1.0, ev.PermitRequested(job="a", phase="rollout"))
    on.handle(2.0, ev.JobChanged(job="a", held=True))
    on.handle(3.0, ev.JobChanged(job="a", held=False))
    on.handle(4.0, ev.PermitLost(job="a", token=on.cluster.jobs["a"].token))
    assert not any(isinstance(each, do.Suspend) for each in iterate(on, 5.0, "a"))


def test_an_idle_job_is_held_at_once_and_one_that_moves_when_it_is_there() -> None:
    on = scheduler(2, 2)
    arrive(on, 0.0, spec("idle"), spec("mover"))
    made = on.handle(1.0, ev.JobChanged(job="idle", held=True))
    assert any(isinstance(each, do.Suspend) for each in made)
    home = on.cluster.jobs["mover"].home
    assert home is not None
    on.handle(2.0, ev.NodeClosed(node=home.nodes[0][0], status="draining"))
    assert on.cluster.jobs["mover"].going
    assert on.handle(3.0, ev.JobChanged(job="mover", held=True)) == []
    made = on.handle(4.0, ev.MoveFinished(job="mover"))
    assert [each.job for each in made if isinstance(each, do.Suspend)] == ["mover"]
    assert not on.cluster.groups


def test_a_long_hold_is_no_patience() -> None:
    on = scheduler(1, 1)
    arrive(on, 0.0, spec("a"), spec("held"))
    on.handle(1.0, ev.JobChanged(job="held", held=True))
    later = 2.0 + SCARCE.patience_s
    arrive(on, later, spec("b"))
    on.handle(later + 1.0, ev.JobChanged(job="held", held=False))
    assert [job.spec.id for job in on.queue.waiting(later + 2.0)] == ["b", "held"]


def test_priority_changes_who_is_next_of_a_team() -> None:
    on = scheduler(1, 1)
    arrive(on, 0.0, spec("a"), spec("b", priority=1), spec("c"))
    on.handle(1.0, ev.JobChanged(job="c", priority=2))
    assert [job.spec.id for job in on.queue.waiting(2.0)] == ["c", "b"]


@pytest.mark.parametrize("first", ["held", "failed"])
def test_a_held_job_whose_node_failed_loses_its_state_and_no_time_by_the_hold(first: str) -> None:
    on = scheduler(1, 1)
    arrive(on, 0.0, spec("a"))
    on.handle(1.0, ev.PermitRequested(job="a", phase="rollout"))
    hold, fail = ev.JobChanged(job="a", held=True), ev.NodeFailed(node="rollout0")
    for now, event in enumerate((hold, fail) if first == "held" else (fail, hold)):
        on.handle(10.0 * (now + 1), event)
    on.handle(30.0, ev.NodeJoined(machine=machines(1, 1)[0]))
    made = on.handle(120.0, ev.JobChanged(job="a", held=False))
    assert [each.reason for each in made if isinstance(each, do.Move)] == ["failure"]
    assert on.cluster.jobs["a"].started == pytest.approx(100.0)


def test_the_clock_of_a_job_whose_node_failed_goes_on_with_its_release() -> None:
    on = scheduler(1, 1)
    arrive(on, 0.0, spec("a"))
    on.handle(10.0, ev.NodeFailed(node="rollout0"))
    on.handle(20.0, ev.JobChanged(job="a", held=True))
    on.handle(120.0, ev.JobChanged(job="a", held=False))
    made = on.handle(150.0, ev.NodeJoined(machine=machines(1, 1)[0]))
    assert [each.reason for each in made if isinstance(each, do.Move)] == ["failure"]
    assert on.cluster.jobs["a"].started == pytest.approx(100.0)


def test_jobs_that_wait_for_agents_or_closed_nodes_keep_nobody_else_from_free_nodes() -> None:
    on = scheduler(1, 1)
    for number in range(TRIED):
        programs(on, f"p{number}")
    assert placed(arrive(on, 1.0, spec("driven"))) == ["driven"]
    on.handle(2.0, ev.JobEnded(job="driven"))
    assert placed(heard(on, "rollout0")) == ["p0"]


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_a_held_job_that_loses_its_permit_leaves_where_its_iteration_begins_again(
    phase: str,
) -> None:
    on = scheduler(1, 1)
    arrive(on, 0.0, spec("a"))
    on.handle(1.0, ev.PermitRequested(job="a", phase="rollout"))
    job = on.cluster.jobs["a"]
    if phase == "train":
        on.handle(2.0, ev.PhaseFinished(job="a", phase="rollout", seconds=1.0, token=job.token))
        on.handle(2.0, ev.PermitRequested(job="a", phase="train"))
    on.handle(3.0, ev.JobChanged(job="a", held=True))
    made = on.handle(4.0, ev.PermitLost(job="a", token=job.token))
    assert any(isinstance(each, do.Suspend) for each in made) == (phase == "rollout")

"""Places for connections: nobody who has shown a credential is kept out by those who have not."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollpacker.connection_limits import ConnectionPlace, Places

STRANGERS, KNOWN, EACH = 4, 6, 3


class Server(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.places = Places(strangers=STRANGERS, known=KNOWN, each=EACH)
        self.open: list[ConnectionPlace] = []
        self.shut: list[ConnectionPlace] = []

    def come(self) -> ConnectionPlace:
        def close() -> None:
            self.open.remove(place)
            self.shut.append(place)

        place = self.places.take(close)
        self.open.append(place)
        return place

    @rule()
    def a_stranger_comes(self) -> None:
        before = [each for each in self.open if each.who is None]
        known = [each for each in self.open if each.who is not None]
        place = self.come()
        assert place in self.open
        assert all(each in self.open for each in known)
        if len(before) == STRANGERS:
            assert before[0] in self.shut

    @rule(who=st.sampled_from("abc"))
    def somebody_comes(self, who: str) -> None:
        others = [each for each in self.open if each.who not in (None, who)]
        mine = [each for each in self.open if each.who == who]
        place = self.come()
        self.places.know(place, who)
        if all(each.busy for each in mine) and len(mine) == EACH:
            assert place in self.shut
        if len(mine) >= EACH:
            assert all(each in self.open for each in others)
        most = max((sum(each.who == w for each in others) for w in "abc"), default=0)
        if len(mine) < EACH and (len(mine) + len(others) < KNOWN or len(mine) < most):
            # However busy those are that have more.
            assert place in self.open
        if len(mine) < EACH and len(mine) + len(others) < KNOWN:
            assert all(each in self.open for each in (*mine, *others))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), busy=st.booleans())
    def one_is_answered(self, data: st.DataObject, busy: bool) -> None:
        self.places.answering(data.draw(st.sampled_from(self.open)), busy)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def one_leaves(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.open))
        self.open.remove(place)
        self.places.leave(place)

    @rule(who=st.sampled_from("abc"))
    def a_credential_ends(self, who: str) -> None:
        others = [each for each in self.open if each.who != who]
        self.places.dismiss(who)
        assert self.open == others

    @precondition(lambda self: self.shut)
    @rule(data=st.data())
    def what_is_closed_says_more(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.shut))
        self.places.know(place, "a")
        self.places.answering(place, False)
        self.places.leave(place)

    @invariant()
    def nobody_has_too_many(self) -> None:
        known = [each for each in self.open if each.who is not None]
        assert len(self.open) - len(known) <= STRANGERS
        assert len(known) <= KNOWN
        assert all(sum(each.who == who for each in known) <= EACH for who in "abc")
        assert len(self.places) == len(self.open)


TestServer = Server.TestCase
TestServer.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)

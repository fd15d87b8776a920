//! Who runs and who waits: root runs in line for a slot, within the limits of the house, their agent and their key, and
//! fair between keys. Only counts and order; knows nothing of tasks, locks or the record.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::fair::Limits;
use crate::fair::shares::Shares;

/// Without a key, and of an agent without a limit: both stand first in their lists, and nothing bounds them.
const UNNAMED: u32 = 0;

/// Whose limits a run counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    key: u32,
    agent: u32,
}

/// A place in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Whose limits it counts for.
    pub seat: Seat,
    /// Of two with one key and one agent the lower is the earlier.
    number: u64,
}

/// The line. `W` is what its owner keeps of each run that waits.
///
/// After [`Line::release`] its owner asks for [`Line::admit`] until there is none: whoever comes later finds a free slot
/// only where nobody who waits could take it.
#[derive(Debug)]
pub struct Line<W> {
    limits: Limits,
    /// The room for those that wait.
    places: Shares,
    /// The slots, where the keys share them.
    slots: Option<Shares>,
    /// What is at work, children included.
    live: Shares,
    running: usize,
    waiting: usize,
    /// Those that wait for something else before they come in line.
    aside: usize,
    keys: Vec<Key<W>>,
    key_names: HashMap<Box<str>, u32>,
    agents: Vec<Holder>,
    agent_names: HashMap<Box<str>, u32>,
    /// The keys of which a run waits; who was served longest ago stands first.
    turns: BTreeSet<(u64, u32)>,
    /// Counts the slots that were ever given.
    served: u64,
    /// Counts those that ever waited.
    numbers: u64,
}

/// Who may hold so many slots at once.
#[derive(Debug)]
struct Holder {
    limit: usize,
    running: usize,
}

impl Holder {
    fn new(limit: Option<usize>) -> Self {
        Self {
            limit: limit.unwrap_or(usize::MAX),
            running: 0,
        }
    }

    fn has_room(&self) -> bool {
        self.running < self.limit
    }
}

#[derive(Debug)]
struct Key<W> {
    holder: Holder,
    /// Its part of the room for those that wait.
    part: usize,
    /// Its part of the slots.
    slots: usize,
    /// Its part of what may be at work, children included.
    live: usize,
    /// Child runs at work: nobody waits for them, but they count for `max_live`.
    children: usize,
    /// When it was last given a slot, by [`Line::served`].
    turn: u64,
    waiting: usize,
    aside: usize,
    /// Its runs that wait, by agent: one whose agent is at its limit holds up nobody behind it. Agents without a limit
    /// share the first lane, so there are no more lanes than the configuration has limits.
    lanes: Vec<BTreeMap<u64, W>>,
}

impl<W> Key<W> {
    fn new(limit: Option<usize>, part: usize, slots: usize, live: usize) -> Self {
        Self {
            holder: Holder::new(limit),
            part,
            slots,
            live,
            children: 0,
            turn: 0,
            waiting: 0,
            aside: 0,
            lanes: Vec::new(),
        }
    }

    fn has_room(&self, slots: Option<&Shares>, live: &Shares) -> bool {
        let taken = self.holder.running;
        self.holder.has_room()
            && live.has_room(self.live, self.at_work())
            && slots.is_none_or(|slots| slots.has_room(self.slots, taken))
    }

    /// Its runs at work, children included.
    fn at_work(&self) -> usize {
        self.holder.running + self.children
    }

    /// Those that wait, also for something else.
    fn queued(&self) -> usize {
        self.waiting + self.aside
    }

    /// The agent of its earliest run that could start now.
    fn first(&self, agents: &[Holder], slots: Option<&Shares>, live: &Shares) -> Option<u32> {
        if !self.has_room(slots, live) {
            return None;
        }
        let open = (0..).zip(&self.lanes).zip(agents);
        open.filter(|(_, agent)| agent.has_room())
            .filter_map(|((at, lane), _)| Some((*lane.first_key_value()?.0, at)))
            .min()
            .map(|(_, at)| at)
    }
}

impl<W> Line<W> {
    /// An empty house with these limits.
    pub fn new(limits: Limits) -> Self {
        let mut agents = vec![Holder::new(None)];
        let mut agent_names = HashMap::new();
        for ((name, limit), at) in limits.per_agent.iter().zip(1..) {
            agents.push(Holder::new(Some(*limit)));
            agent_names.insert(name.as_str().into(), at);
        }
        let keys = limits.keys.len();
        Self {
            places: Shares::new(limits.max_queued, keys, 1),
            slots: (limits.shares_slots).then(|| Shares::new(limits.max_running, keys, 0)),
            live: Shares::new(limits.max_live, keys, 0),
            limits,
            running: 0,
            waiting: 0,
            aside: 0,
            keys: vec![Key::new(None, 0, 0, 0)],
            key_names: HashMap::new(),
            agents,
            agent_names,
            turns: BTreeSet::new(),
            served: 0,
            numbers: 0,
        }
    }

    /// Whose limits a run of this agent counts for that was accepted with the key of this name. A name is remembered for
    /// good: there are as many as the configuration has keys, or had when a run was accepted that is still unfinished.
    pub fn seat(&mut self, key: Option<&str>, agent: &str) -> Seat {
        let agent = match self.agent_names.is_empty() {
            true => UNNAMED,
            false => self.agent_names.get(agent).copied().unwrap_or(UNNAMED),
        };
        let key = match key {
            None => UNNAMED,
            Some(name) => match self.key_names.get(name) {
                Some(at) => *at,
                None => self.new_key(name),
            },
        };
        Seat { key, agent }
    }

    fn new_key(&mut self, name: &str) -> u32 {
        let Ok(at) = u32::try_from(self.keys.len()) else {
            return UNNAMED;
        };
        let Limits {
            keys,
            per_key,
            other_keys,
            ..
        } = &self.limits;
        let is_configured = keys.iter().any(|key| key == name);
        let slots = self.slots.as_ref();
        self.keys.push(Key::new(
            per_key.get(name).copied().or(*other_keys),
            self.places.part(is_configured),
            slots.map_or(0, |slots| slots.part(is_configured)),
            self.live.part(is_configured),
        ));
        self.key_names.insert(name.into(), at);
        at
    }

    /// Takes a slot at once; false where none is free, or a limit is reached.
    pub fn take(&mut self, seat: Seat) -> bool {
        let has_room = self.keys[seat.key as usize].has_room(self.slots.as_ref(), &self.live);
        let free = self.is_free() && has_room && self.agent(seat).has_room();
        if free {
            self.serve(seat);
        }
        free
    }

    /// Whether one more root run may be at work, as far as the daemon's own limits decide that.
    fn is_free(&self) -> bool {
        self.running < self.limits.max_running
    }

    /// Counts a child run of this key; false where as many runs are at work as may, in all or of the key.
    pub fn take_child(&mut self, seat: Seat) -> bool {
        let key = &self.keys[seat.key as usize];
        let free = self.live.has_room(key.live, key.at_work());
        if free {
            self.add_children(seat, 1);
        }
        free
    }

    /// Counts child runs, however many are at work.
    pub fn add_children(&mut self, seat: Seat, count: usize) {
        let key = &mut self.keys[seat.key as usize];
        for _ in 0..count {
            self.live.add(key.live, key.at_work());
            key.children += 1;
        }
    }

    /// These child runs are not at work any more. As after [`Line::release`], its owner calls [`Line::admit`].
    pub fn release_children(&mut self, seat: Seat, count: usize) {
        let key = &mut self.keys[seat.key as usize];
        for _ in 0..count {
            self.live.remove(key.live, key.at_work());
            key.children -= 1;
        }
    }

    /// Whether one more of this key may wait: while its part of the room is not full, or that for whoever comes first.
    pub fn has_room(&self, seat: Seat) -> bool {
        let key = &self.keys[seat.key as usize];
        self.places.has_room(key.part, key.queued())
    }

    /// Counts one that waits for something else.
    pub fn step_aside(&mut self, seat: Seat) {
        self.queue(seat);
        self.key(seat).aside += 1;
        self.aside += 1;
    }

    /// It waits no longer, or comes in line now.
    pub fn step_back(&mut self, seat: Seat) {
        self.unqueue(seat);
        self.key(seat).aside -= 1;
        self.aside -= 1;
    }

    /// One more of this key is about to wait.
    fn queue(&mut self, seat: Seat) {
        let key = &self.keys[seat.key as usize];
        self.places.add(key.part, key.queued());
    }

    /// One of this key that waits is about to go.
    fn unqueue(&mut self, seat: Seat) {
        let key = &self.keys[seat.key as usize];
        self.places.remove(key.part, key.queued());
    }

    /// Stands at the end of the line, however long it is.
    pub fn join(&mut self, seat: Seat, who: W) -> Ticket {
        self.numbers += 1;
        let number = self.numbers;
        self.queue(seat);
        self.waiting += 1;
        let key = self.key(seat);
        let lane = lane_of(seat);
        if key.lanes.len() <= lane {
            key.lanes.resize_with(lane + 1, BTreeMap::new);
        }
        key.lanes[lane].insert(number, who);
        key.waiting += 1;
        let turn = key.turn;
        self.turns.insert((turn, seat.key));
        Ticket { seat, number }
    }

    /// Who stands there; none where it has been given a slot.
    pub fn find(&mut self, ticket: Ticket) -> Option<&mut W> {
        let lane = self.key(ticket.seat).lanes.get_mut(lane_of(ticket.seat))?;
        lane.get_mut(&ticket.number)
    }

    /// Steps out of line; none where it has been given a slot, which is then to be released.
    pub fn leave(&mut self, ticket: Ticket) -> Option<W> {
        let seat = ticket.seat;
        let key = self.key(seat);
        let who = key.lanes.get_mut(lane_of(seat))?.remove(&ticket.number)?;
        self.unqueue(seat);
        let key = self.key(seat);
        key.waiting -= 1;
        if key.waiting == 0 {
            let turn = key.turn;
            self.turns.remove(&(turn, seat.key));
        }
        self.waiting -= 1;
        Some(who)
    }

    /// Gives a slot back.
    pub fn release(&mut self, seat: Seat) {
        self.running -= 1;
        let key = &mut self.keys[seat.key as usize];
        if let Some(slots) = &mut self.slots {
            slots.remove(key.slots, key.holder.running);
        }
        self.live.remove(key.live, key.at_work());
        key.holder.running -= 1;
        self.agent(seat).running -= 1;
    }

    /// Gives a free slot to who is next: of the keys of which a run could start, the one that was served longest ago;
    /// of its runs the earliest that could. None where no slot is free, or nobody who waits could take it.
    pub fn admit(&mut self) -> Option<W> {
        if self.waiting == 0 || !self.is_free() {
            return None;
        }
        let seat = self.turns.iter().find_map(|(_, key)| {
            let key_of = &self.keys[*key as usize];
            let agent = key_of.first(&self.agents, self.slots.as_ref(), &self.live)?;
            Some(Seat { key: *key, agent })
        })?;
        let number = *self.key(seat).lanes[lane_of(seat)].first_key_value()?.0;
        let who = self.leave(Ticket { seat, number });
        self.serve(seat);
        who
    }

    /// How many hold a slot, and how many wait, also for something else.
    pub fn load(&self) -> (usize, usize) {
        (self.running, self.waiting + self.aside)
    }

    /// Counts a slot for them, and puts the key behind all others.
    fn serve(&mut self, seat: Seat) {
        self.running += 1;
        self.served += 1;
        self.agent(seat).running += 1;
        let now = self.served;
        let key = &mut self.keys[seat.key as usize];
        if let Some(slots) = &mut self.slots {
            slots.add(key.slots, key.holder.running);
        }
        self.live.add(key.live, key.at_work());
        key.holder.running += 1;
        let before = std::mem::replace(&mut key.turn, now);
        if key.waiting > 0 {
            self.turns.remove(&(before, seat.key));
            self.turns.insert((now, seat.key));
        }
    }

    // Seats are made by `seat` alone, from what stands in both lists, and nothing is ever taken out of them.

    fn key(&mut self, seat: Seat) -> &mut Key<W> {
        &mut self.keys[seat.key as usize]
    }

    fn agent(&mut self, seat: Seat) -> &mut Holder {
        &mut self.agents[seat.agent as usize]
    }
}

fn lane_of(seat: Seat) -> usize {
    seat.agent as usize
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{Line, Ticket};
    use crate::fair::Limits;

    const KEYS: [Option<&str>; 4] = [None, Some("ada"), Some("bob"), Some("ci")];
    const AGENTS: [&str; 4] = ["free", "loose", "planner", "reader"];

    fn limits(max_running: usize) -> Limits {
        Limits {
            max_running,
            max_queued: 1000,
            ..Limits::default()
        }
    }

    /// Three may run, one of them a planner, two of them a reader, two of them a key's, one of them ci's.
    fn tight() -> Limits {
        let counts = |counts: &[(&str, usize)]| {
            let named = counts.iter().map(|(name, count)| ((*name).into(), *count));
            named.collect::<BTreeMap<String, usize>>()
        };
        Limits {
            per_agent: counts(&[("planner", 1), ("reader", 2)]),
            per_key: counts(&[("ci", 1)]),
            other_keys: Some(2),
            ..limits(3)
        }
    }

    /// Who comes next, once everybody may.
    fn drain(line: &mut Line<&'static str>) -> Vec<&'static str> {
        line.limits.max_running = usize::MAX;
        std::iter::from_fn(|| line.admit()).collect()
    }

    #[test]
    fn within_a_key_who_comes_first_is_served_first() {
        let mut line = Line::new(limits(0));
        for (agent, who) in [("free", "1"), ("loose", "2"), ("free", "3")] {
            let seat = line.seat(Some("ada"), agent);
            assert!(!line.take(seat));
            line.join(seat, who);
        }
        assert_eq!(line.load(), (0, 3));
        assert_eq!(drain(&mut line), ["1", "2", "3"]);
    }

    #[test]
    fn keys_take_turns() {
        let mut line = Line::new(limits(1));
        let (ada, bob) = (line.seat(Some("ada"), "a"), line.seat(Some("bob"), "a"));
        assert!(line.take(ada));
        for who in ["ada 2", "ada 3", "ada 4"] {
            line.join(ada, who);
        }
        line.join(bob, "bob 1");
        line.join(bob, "bob 2");
        // Ada has had a slot, Bob none.
        assert_eq!(
            drain(&mut line),
            ["bob 1", "ada 2", "bob 2", "ada 3", "ada 4"]
        );
    }

    #[test]
    fn who_took_a_free_slot_has_had_a_turn() {
        let mut line = Line::new(limits(2));
        let (ada, bob) = (line.seat(Some("ada"), "a"), line.seat(Some("bob"), "a"));
        assert!(line.take(bob) && line.take(ada));
        line.join(ada, "ada");
        line.join(bob, "bob");
        line.release(bob);
        assert_eq!((line.admit(), line.admit()), (Some("bob"), None));
    }

    #[test]
    fn a_limited_agent_holds_up_nobody_behind_it() {
        let mut line = Line::new(tight());
        let planner = line.seat(None, "planner");
        let free = line.seat(None, "free");
        assert!(line.take(planner) && line.take(free) && line.take(free));
        line.join(planner, "planner");
        line.join(free, "free");
        line.release(free);
        assert_eq!((line.admit(), line.admit()), (Some("free"), None));
        // A slot is free and the planner still waits for its own.
        line.release(free);
        assert_eq!(line.admit(), None);
        assert!(line.take(free));
        line.release(free);
        line.release(planner);
        assert_eq!(line.admit(), Some("planner"));
    }

    #[test]
    fn a_key_has_its_own_limit_or_that_of_all_others() {
        let mut line = Line::new(tight());
        let (ci, ada) = (
            line.seat(Some("ci"), "free"),
            line.seat(Some("ada"), "free"),
        );
        assert!(line.take(ci) && !line.take(ci));
        assert!(line.take(ada) && line.take(ada));
        line.join(ci, "ci");
        line.release(ada);
        assert_eq!(line.admit(), None);
        line.release(ci);
        assert_eq!(line.admit(), Some("ci"));
    }

    #[test]
    fn one_slot_that_gets_free_may_let_two_start() {
        let mut line = Line::new(Limits {
            max_running: 10,
            ..tight()
        });
        let [ada, bob, ci] = ["ada", "bob", "ci"].map(Some);
        let planner_of_ci = line.seat(ci, "planner");
        assert!(line.take(planner_of_ci));
        let (of_ci, of_ada) = (line.seat(ci, "free"), line.seat(ada, "planner"));
        line.join(of_ci, "ci's");
        line.join(of_ada, "ada's planner");
        let of_bob = line.seat(bob, "planner");
        line.join(of_bob, "bob's planner");
        line.release(planner_of_ci);
        let next = [line.admit(), line.admit(), line.admit()];
        assert_eq!(next, [Some("ada's planner"), Some("ci's"), None]);
    }

    #[test]
    fn the_children_of_a_key_leave_the_others_their_part() {
        let mut line = Line::new(Limits {
            max_live: 8,
            keys: ["ada", "bob"].map(str::to_owned).into(),
            ..limits(8)
        });
        let (ada, bob) = (line.seat(Some("ada"), "a"), line.seat(Some("bob"), "a"));
        assert!(line.take(ada));
        let taken = (0..9).filter(|_| line.take_child(ada)).count();
        assert_eq!(
            taken, 5,
            "the half for whoever comes first, and her part of the other"
        );
        assert!(!line.take(ada));
        assert!(line.take(bob) && line.take_child(bob) && !line.take_child(bob));
        line.join(bob, "bob");
        line.join(ada, "ada");
        line.release_children(ada, 5);
        // She was served before him.
        assert_eq!((line.admit(), line.admit()), (Some("ada"), Some("bob")));
        // What an earlier process let in counts, however much it is.
        line.add_children(bob, 20);
        assert!(!line.take_child(bob));
        line.release_children(bob, 21);
        assert!(line.take_child(bob));
    }

    #[test]
    fn who_leaves_leaves_no_hole() {
        let mut line = Line::new(limits(0));
        let seat = line.seat(Some("ada"), "free");
        let first = line.join(seat, "1");
        let second = line.join(seat, "2");
        line.join(seat, "3");
        assert_eq!(line.leave(second), Some("2"));
        assert_eq!(line.leave(second), None);
        assert_eq!(line.leave(first), Some("1"));
        assert_eq!(line.load(), (0, 1));
        assert_eq!(drain(&mut line), ["3"]);
        assert!(line.turns.is_empty());
    }

    /// What may happen to a line. Numbers choose among what there is.
    #[derive(Clone, Debug)]
    enum Deed {
        Come { key: usize, agent: usize },
        Leave(usize),
        Release(usize),
    }

    fn deed() -> impl Strategy<Value = Deed> {
        prop_oneof![
            3 => (0..KEYS.len(), 0..AGENTS.len()).prop_map(|(key, agent)| Deed::Come { key, agent }),
            1 => any::<usize>().prop_map(Deed::Leave),
            2 => any::<usize>().prop_map(Deed::Release),
        ]
    }

    /// One who waits: a number of its own, where it stands, whose it is.
    #[derive(Clone, Copy, Debug)]
    struct Waiter {
        number: usize,
        ticket: Ticket,
        key: usize,
        agent: usize,
    }

    /// The same in the plainest words: who runs, who waits in the order of arrival, and when each key was served.
    #[derive(Default)]
    struct Plain {
        running: Vec<(usize, usize)>,
        waiting: Vec<Waiter>,
        turns: [usize; KEYS.len()],
        served: usize,
    }

    impl Plain {
        fn could_start(&self, key: usize, agent: usize) -> bool {
            let limits = tight();
            let of_key = self.running.iter().filter(|run| run.0 == key).count();
            let of_agent = self.running.iter().filter(|run| run.1 == agent).count();
            let key_limit =
                KEYS[key].and_then(|name| limits.per_key.get(name).copied().or(limits.other_keys));
            self.running.len() < limits.max_running
                && key_limit.is_none_or(|limit| of_key < limit)
                && (limits.per_agent.get(AGENTS[agent])).is_none_or(|limit| of_agent < *limit)
        }

        fn start(&mut self, key: usize, agent: usize) {
            self.running.push((key, agent));
            self.served += 1;
            self.turns[key] = self.served;
        }

        /// Who must come next: of those that could start the earliest of the key that was served longest ago.
        fn next(&mut self) -> Option<Waiter> {
            let could =
                |at: &usize| self.could_start(self.waiting[*at].key, self.waiting[*at].agent);
            let turn = |at: &usize| {
                let key = self.waiting[*at].key;
                (self.turns[key], key)
            };
            let at = (0..self.waiting.len()).filter(could).min_by_key(turn)?;
            let next = self.waiting.remove(at);
            self.start(next.key, next.agent);
            Some(next)
        }
    }

    proptest! {
        /// Never above a limit, never out of turn, nobody forgotten, no slot lost: whatever happens, the line says what
        /// the plain words say.
        #[test]
        fn it_does_what_the_plain_words_say(deeds in proptest::collection::vec(deed(), 0..200)) {
            let mut line: Line<usize> = Line::new(tight());
            // Keys that were never served stand in the order in which they came to be known.
            for key in KEYS {
                line.seat(key, "free");
            }
            let mut plain = Plain::default();
            for (number, deed) in deeds.into_iter().enumerate() {
                match deed {
                    Deed::Come { key, agent } => {
                        let seat = line.seat(KEYS[key], AGENTS[agent]);
                        let starts = plain.could_start(key, agent);
                        prop_assert_eq!(line.take(seat), starts);
                        if starts {
                            plain.start(key, agent);
                        } else {
                            let ticket = line.join(seat, number);
                            plain.waiting.push(Waiter { number, ticket, key, agent });
                        }
                    }
                    Deed::Leave(which) if !plain.waiting.is_empty() => {
                        let left = plain.waiting.remove(which % plain.waiting.len());
                        prop_assert_eq!(line.leave(left.ticket), Some(left.number));
                    }
                    Deed::Release(which) if !plain.running.is_empty() => {
                        let (key, agent) = plain.running.remove(which % plain.running.len());
                        let seat = line.seat(KEYS[key], AGENTS[agent]);
                        line.release(seat);
                        while let Some(next) = line.admit() {
                            prop_assert_eq!(Some(next), plain.next().map(|next| next.number));
                        }
                        prop_assert!(plain.next().is_none());
                    }
                    Deed::Leave(_) | Deed::Release(_) => {}
                }
                prop_assert_eq!(line.load(), (plain.running.len(), plain.waiting.len()));
                for waiter in &plain.waiting {
                    prop_assert_eq!(line.find(waiter.ticket).copied(), Some(waiter.number));
                }
            }
            // Everybody who still waits is served in the end.
            while let Some((key, agent)) = plain.running.pop() {
                let seat = line.seat(KEYS[key], AGENTS[agent]);
                line.release(seat);
                while let Some(next) = line.admit() {
                    prop_assert_eq!(Some(next), plain.next().map(|next| next.number));
                }
            }
            prop_assert_eq!(line.load(), (0, 0));
            prop_assert!(line.turns.is_empty());
        }
    }
}

//! Finds the due deliveries among the pending ones, which an engine reads in the order of their owners and hosts. It reads blocks of
//! them: to look for each host alone takes many times as long, and clients choose the hosts. Of a host with a backlog only a
//! part is read, because it would be read again for every delivery to another host.

use std::collections::HashSet;

use crate::domain::webhook::DeliveryId;
use crate::store::outbox::DueQuery;

/// The longest wait without jitter, in milliseconds.
pub const MAX_WAIT_MS: i64 = 3_600_000;
/// Pending deliveries of one block.
pub const BLOCK_ROWS: usize = 256;

/// An owner and a host.
pub type Target = (String, String);

/// Deliveries with the times at which they are due.
pub type DueIds = Vec<(i64, DeliveryId)>;

/// A pending delivery.
#[derive(Clone, Debug)]
pub struct Pending {
    pub target: Target,
    pub next_at: i64,
    pub id: DeliveryId,
}

/// What is to be read after a block.
pub enum NextRead {
    /// The block behind this target.
    BlockAfter(Target),
    /// This target has more than a block: what is due of it, for [`DueWalk::add_backlog`], and then the block behind it.
    Backlog(Target),
    Nothing,
}

pub struct DueWalk<'q> {
    query: &'q DueQuery,
    in_flight: HashSet<DeliveryId>,
    /// Deliveries are due up to this time,
    due_by: i64,
    /// and after this one, which is further ahead than any wait.
    latest: i64,
    /// Of the owners before this one, with their times.
    due: DueIds,
    owner: String,
    due_of_owner: DueIds,
    next_at: Option<i64>,
}

impl<'q> DueWalk<'q> {
    pub fn new(query: &'q DueQuery, due_by: i64, latest: i64) -> Self {
        Self {
            query,
            in_flight: query.in_flight.iter().copied().collect(),
            due_by,
            latest,
            due: Vec::new(),
            owner: String::new(),
            due_of_owner: Vec::new(),
            next_at: None,
        }
    }

    /// Takes the next [`BLOCK_ROWS`] deliveries, or all that are left, by owner, host and time.
    pub fn add_block(&mut self, block: &[Pending]) -> NextRead {
        let Some(last) = block.last().filter(|_| block.len() >= BLOCK_ROWS) else {
            self.add(block);
            return NextRead::Nothing;
        };
        // The block may have only a part of the last target.
        let whole = block.partition_point(|it| it.target != last.target);
        let (whole, _) = block.split_at(whole);
        self.add(whole);
        let target = last.target.clone();
        match whole.last() {
            Some(before) => NextRead::BlockAfter(before.target.clone()),
            None if self.is_excluded(&target) => NextRead::BlockAfter(target),
            None => NextRead::Backlog(target),
        }
    }

    /// Takes the first due deliveries of a target, without those in flight, and when the first of its others is due.
    pub fn add_backlog(&mut self, target: &Target, due: DueIds, next_at: Option<i64>) {
        self.enter(&target.0);
        self.due_of_owner.extend(due);
        self.next_at = self.next_at.into_iter().chain(next_at).min();
        self.limit();
    }

    /// Takes deliveries whose time is further ahead than their own wait. They may be due already.
    pub fn add_far_ahead(&mut self, due: DueIds) {
        let others = due
            .into_iter()
            .filter(|(_, id)| !self.in_flight.contains(id));
        self.due.extend(others);
    }

    /// The due ones with their times, longest due first, and when the first of the others is due.
    pub fn finish(mut self) -> (DueIds, Option<i64>) {
        self.due.append(&mut self.due_of_owner);
        self.due.sort_unstable();
        self.due.dedup();
        (self.due, self.next_at)
    }

    fn add(&mut self, pending: &[Pending]) {
        for it in pending {
            self.enter(&it.target.0);
            if self.is_excluded(&it.target) {
                continue;
            }
            let is_due = it.next_at <= self.due_by || it.next_at > self.latest;
            if is_due && !self.in_flight.contains(&it.id) {
                self.due_of_owner.push((it.next_at, it.id));
            }
            if it.next_at > self.due_by {
                self.next_at = self.next_at.into_iter().chain([it.next_at]).min();
            }
        }
        self.limit();
    }

    fn enter(&mut self, owner: &str) {
        if self.owner != owner {
            self.limit();
            self.due.append(&mut self.due_of_owner);
            owner.clone_into(&mut self.owner);
        }
    }

    fn limit(&mut self) {
        self.due_of_owner.sort_unstable();
        self.due_of_owner.truncate(self.query.limit);
    }

    fn is_excluded(&self, target: &Target) -> bool {
        self.query.excluded_hosts.contains(target)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::{BLOCK_ROWS, DueWalk, NextRead, Pending, Target};
    use crate::domain::webhook::DeliveryId;
    use crate::store::outbox::DueQuery;

    const NOW: i64 = 1_000;
    const LATEST: i64 = 9_000;

    fn pending(owner: &str, host: &str, next_at: i64, id: u128) -> Pending {
        Pending {
            target: (owner.to_owned(), host.to_owned()),
            next_at,
            id: DeliveryId(Uuid::from_u128(id)),
        }
    }

    fn query(limit: usize) -> DueQuery {
        DueQuery {
            limit,
            ..DueQuery::default()
        }
    }

    /// Reads as an engine does. Returns the numbers of the due ones, when the next one is due, and how often it has read.
    fn walk(all: &[Pending], query: &DueQuery) -> (Vec<u128>, Option<i64>, usize) {
        let mut walk = DueWalk::new(query, NOW, LATEST);
        let mut after: Option<Target> = None;
        let mut reads = 0;
        loop {
            reads += 1;
            let behind = all
                .iter()
                .filter(|it| after.as_ref().is_none_or(|after| it.target > *after));
            let block: Vec<Pending> = behind.take(BLOCK_ROWS).cloned().collect();
            let target = match walk.add_block(&block) {
                NextRead::Nothing => break,
                NextRead::BlockAfter(target) => target,
                NextRead::Backlog(target) => {
                    reads += 1;
                    let of_target = || all.iter().filter(|it| it.target == target);
                    let due = of_target().filter(|it| it.next_at <= NOW);
                    let due = due.take(query.limit).map(|it| (it.next_at, it.id));
                    let next_at = of_target().map(|it| it.next_at).find(|at| *at > NOW);
                    walk.add_backlog(&target, due.collect(), next_at);
                    target
                }
            };
            after = Some(target);
        }
        let (due, next_at) = walk.finish();
        let due = due.iter().map(|(_, id)| id.0.as_u128()).collect();
        (due, next_at, reads)
    }

    #[test]
    fn many_hosts_are_read_with_few_reads() {
        let host = |n: u128| format!("h{n:05}");
        let time = |n: u128| match n {
            700 => NOW - 1,
            19_999 => NOW - 2,
            5 => LATEST + 1,
            _ => NOW + 100,
        };
        let all: Vec<_> = (0..20_000)
            .map(|n| pending("", &host(n), time(n), n))
            .collect();
        let (due, next_at, reads) = walk(&all, &query(10));
        assert_eq!(due, [19_999, 700, 5]);
        assert_eq!(next_at, Some(NOW + 100));
        assert!(reads < 90, "{reads} reads");
    }

    #[test]
    fn a_backlog_is_not_read_as_a_whole() {
        let mut all: Vec<_> = (0..5_000).map(|n| pending("", "a", 1, n)).collect();
        all.push(pending("", "b", 2, 5_000));
        all.push(pending("", "c", NOW + 1, 5_001));
        assert_eq!(walk(&all, &query(2)), (vec![0, 1], Some(NOW + 1), 3));
        let full = DueQuery {
            excluded_hosts: vec![(String::new(), "a".to_owned())],
            ..query(2)
        };
        assert_eq!(walk(&all, &full), (vec![5_000], Some(NOW + 1), 2));
        let waiting = DueQuery {
            in_flight: vec![DeliveryId(Uuid::from_u128(5_000))],
            ..full
        };
        assert_eq!(walk(&all, &waiting), (vec![], Some(NOW + 1), 2));
    }

    #[test]
    fn each_owner_has_the_limit_wherever_a_block_ends() {
        for hosts in [BLOCK_ROWS / 2 - 1, BLOCK_ROWS / 2, BLOCK_ROWS] {
            let mut all = Vec::new();
            for owner in ["ada", "bob"] {
                for host in 0..hosts {
                    for n in 0..2_i64 {
                        let at = i64::try_from(hosts - host).expect("a time");
                        let id = all.len() as u128;
                        all.push(pending(owner, &format!("h{host:05}"), at + n, id));
                    }
                }
            }
            let mut expected = Vec::new();
            for owner in ["ada", "bob"] {
                let of_owner = all.iter().filter(|it| it.target.0 == owner);
                let mut due: Vec<_> = of_owner.map(|it| (it.next_at, it.id)).collect();
                due.sort_unstable();
                expected.extend(due.into_iter().take(3));
            }
            expected.sort_unstable();
            let expected: Vec<_> = expected.iter().map(|(_, id)| id.0.as_u128()).collect();
            let (due, next_at, _) = walk(&all, &query(3));
            assert_eq!((due, next_at), (expected, None), "{hosts} hosts");
        }
    }
}

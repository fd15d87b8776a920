//! Permits of all nodes: who has one, who waits for one, and who is given the next.

use std::collections::HashMap;

use crate::domain::run::RunId;
use crate::store::cluster::{DecidePermits, PermitDemand, RunningTrees, WaitingTree};
use crate::store::encoding::integers::signed;
use crate::store::postgres::commit::{CommitError, Refusal, WriterState};
use crate::store::postgres::connection::{Connection, Outcome, Query};
use crate::store::postgres::statements::Sql;
use crate::store::sql::value::values;

/// Trees of one key and one agent that are considered at once.
const MAX_WAITING: u64 = 64;

/// The result if another node gives permits at the moment.
pub const BUSY: u64 = u64::MAX;

/// Gives permits to the waiting trees that `decide` chooses, of any node; returns their number, or [`BUSY`].
pub async fn give(
    state: &WriterState,
    db: &Connection,
    decide: &DecidePermits,
) -> Result<u64, CommitError> {
    let begin = [
        Query::new(Sql::Begin, Vec::new()),
        state.guard(),
        Query::new(Sql::LockPermits, Vec::new()),
        Query::new(Sql::CountPermits, Vec::new()),
        Query::new(
            Sql::WaitingTrees,
            values! {":max": signed(MAX_WAITING)}.into(),
        ),
        Query::new(Sql::PermitTurns, Vec::new()),
    ];
    let outcomes = db.execute_all(&begin).await?;
    if outcomes[1].affected == 0 {
        return Err(CommitError::Refused(Refusal::Node));
    }
    if outcomes[2].affected == 0 {
        db.execute(&Query::new(Sql::Commit, Vec::new())).await?;
        return Ok(BUSY);
    }
    let demand = demand(&outcomes[3], &outcomes[4], &outcomes[5])?;
    let chosen = decide(&demand);
    let mut end = Vec::new();
    if !chosen.is_empty() {
        let (owners, turns) = turns(&demand, &chosen);
        let roots: Vec<_> = chosen.iter().map(|root| root.0).collect();
        end.push(Query::new(
            Sql::GivePermits,
            values! {":roots": roots}.into(),
        ));
        let turns = values! {":owners": owners, ":turns": turns};
        end.push(Query::new(Sql::TakeTurns, turns.into()));
    }
    end.push(Query::new(Sql::Commit, Vec::new()));
    db.execute_all(&end).await?;
    Ok(chosen.len() as u64)
}

fn demand(
    running: &Outcome,
    waiting: &Outcome,
    turns: &Outcome,
) -> Result<PermitDemand, tokio_postgres::Error> {
    let running = running.rows.iter().map(|row| {
        let trees: i64 = row.try_get("trees")?;
        Ok(RunningTrees {
            owner: row.try_get("owner")?,
            agent: row
                .try_get::<_, Option<String>>("agent")?
                .unwrap_or_default(),
            trees: usize::try_from(trees).unwrap_or_default(),
        })
    });
    let waiting = waiting.rows.iter().map(|row| {
        Ok(WaitingTree {
            root: RunId(row.try_get("root")?),
            owner: row.try_get("owner")?,
            agent: row
                .try_get::<_, Option<String>>("agent")?
                .unwrap_or_default(),
            has_returned: row.try_get("returned")?,
        })
    });
    let turns = turns.rows.iter().map(|row| {
        let turn: i64 = row.try_get("turn")?;
        Ok((row.try_get("owner")?, turn.unsigned_abs()))
    });
    Ok(PermitDemand {
        running: running.collect::<Result<_, tokio_postgres::Error>>()?,
        waiting: waiting.collect::<Result<_, tokio_postgres::Error>>()?,
        turns: turns.collect::<Result<_, tokio_postgres::Error>>()?,
    })
}

/// The keys of the chosen trees, each with its turn after all others so far.
fn turns<'d>(demand: &'d PermitDemand, chosen: &[RunId]) -> (Vec<&'d str>, Vec<i64>) {
    let owners: HashMap<RunId, &str> = demand
        .waiting
        .iter()
        .map(|tree| (tree.root, tree.owner.as_deref().unwrap_or_default()))
        .collect();
    let last = demand.turns.iter().map(|(_, turn)| *turn).max();
    let next = last.unwrap_or_default() + 1;
    let mut taken: HashMap<&str, i64> = HashMap::new();
    for (number, root) in (next..).zip(chosen) {
        if let Some(owner) = owners.get(root) {
            taken.insert(owner, signed(number));
        }
    }
    taken.into_iter().unzip()
}

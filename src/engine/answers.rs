//! A reply's calls and what comes of them: performed, taken in, watched for circles; and whether a run may go on at all.
//! Knows no provider.

use std::sync::Arc;

use tokio::time::Instant;

use crate::domain::event::EventKind;
use crate::domain::message::{ToolCall, ToolResult};
use crate::domain::run::RunId;
use crate::engine::caller::{Caller, Drive};
use crate::engine::calls::{self, Batch, Unanswered};
use crate::engine::close::{Ending, How};
use crate::engine::conversation::{Conversation, Repeats};
use crate::engine::endings;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::remains::Begun;
use crate::engine::turn_error::TurnError;
use crate::store::{Change, Step, StoreError};
use crate::tools::toolbox::Toolbox;

/// What a run's calls are performed with.
pub struct Hands {
    /// Its tools.
    pub toolbox: Arc<Toolbox>,
    /// What drives its children.
    pub drive: Drive,
}

/// The calls of one reply.
pub struct Asked {
    /// The turn of the reply.
    pub turn: u32,
    /// What it asks for.
    pub calls: Vec<ToolCall>,
    /// What an earlier process recorded.
    pub results: Vec<Option<ToolResult>>,
    /// What it had begun.
    pub begun: Arc<Begun>,
}

/// Performs the calls that have no result yet, and takes all results in.
pub async fn answer(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    hands: &Hands,
    asked: Asked,
    talk: &mut Conversation,
) -> Result<(), Ending> {
    let Asked {
        turn,
        calls,
        results,
        begun,
    } = asked;
    let toolbox = &hands.toolbox;
    let calls: Vec<_> = calls
        .into_iter()
        .map(|call| toolbox.resolve(call))
        .collect();
    let is_new = results.iter().any(Option::is_none);
    let is_old = begun.last_turn >= turn;
    let ended: Vec<RunId> = calls
        .iter()
        .filter_map(|call| begun.children.get(&call.id))
        .filter(|child| child.status.is_terminal())
        .map(|child| child.id)
        .collect();
    let delegate = Arc::new(Caller::new(engine, live, &begun, hands.drive));
    let batch = Batch {
        engine: Arc::clone(engine),
        live: Arc::clone(live),
        toolbox: Arc::clone(&hands.toolbox),
        delegate,
        turn,
        begun,
    };
    let results = match calls::perform(batch, calls, results).await {
        Ok(results) => results,
        Err(Unanswered::Lost(error)) => return Err(error.into()),
        Err(Unanswered::Interrupted(tool)) => {
            let message = format!(
                "the daemon stopped while tool \"{tool}\" was at work; whether it did its work is not known, and it is \
                 not safe to repeat"
            );
            return Err(Ending::failed(endings::interrupted(&message)));
        }
    };
    if is_old {
        // What was refused before ends the run now as it would have then.
        for result in results.iter().filter(|result| result.is_error) {
            live.refuse_again(&result.content);
        }
        refuse_for(engine, live, &ended).await?;
    }
    match talk.answer(results) {
        Repeats::Fine => Ok(()),
        // Told by the process that took the last of the results in.
        Repeats::Hinted(_) if !is_new => Ok(()),
        Repeats::Hinted(repeats) => {
            let warning = EventKind::LoopWarning {
                turn,
                repeats,
                message: endings::looped(repeats).message,
            };
            engine
                .journal
                .note(live, Change::Nothing, Vec::new(), vec![warning])
                .await?;
            Ok(())
        }
        Repeats::TooMany(repeats) => Err(Ending::failed(endings::looped(repeats))),
    }
}

/// Remembers what accounts of this run refused below it, to children that had ended before a restart: their own ends tell
/// only the first limit that each reached.
async fn refuse_for(engine: &Engine, live: &LiveRun, children: &[RunId]) -> Result<(), StoreError> {
    if live.tree.budgets.refusals(&live.accounts).is_empty() {
        return Ok(());
    }
    let store = engine.journal.store();
    for child in children {
        for run in store.tree(*child).await? {
            for step in store.steps(run.id).await? {
                if let Step::Result { result, .. } = step
                    && result.is_error
                {
                    live.refuse_again(&result.content);
                }
            }
        }
    }
    Ok(())
}

/// Whether the run may go on: not cancelled, not overdue, its budget not spent.
pub fn check(live: &LiveRun) -> Result<(), TurnError> {
    if live.stop.is_cancelled() {
        return Err(TurnError::Stopped);
    }
    if live
        .deadline()
        .is_some_and(|deadline| deadline.at <= Instant::now())
    {
        return Err(TurnError::Overdue);
    }
    live.check_budgets().map_err(TurnError::Budget)
}

/// The run's end where a turn could not be taken.
pub fn failed_turn(live: &LiveRun, error: TurnError) -> Ending {
    Ending::of(match error {
        TurnError::Stopped => How::Stopped,
        TurnError::Store(error) => return error.into(),
        TurnError::Overdue => How::Failed(endings::overdue(live.deadline())),
        TurnError::Budget(exceeded) => How::Failed(endings::budget(&exceeded)),
        TurnError::Provider(error) => How::Failed(endings::provider(&error)),
        TurnError::BatchExpired => How::Failed(endings::batch_expired()),
        TurnError::Unavailable(unavailable) => How::Failed(endings::unavailable(&unavailable)),
    })
}

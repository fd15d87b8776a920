//! What an earlier process recorded of a run, taken in again, and what it had begun, finished. Asks no model.

use std::sync::Arc;

use crate::domain::message::ToolCall;
use crate::domain::structured;
use crate::domain::usage::Usage;
use crate::engine::answers::{Asked, Hands, answer, check, failed_turn};
use crate::engine::close::{Ending, How, State};
use crate::engine::conversation::Conversation;
use crate::engine::entry::Draft;
use crate::engine::final_text::{self, MAX_RESUMED_CHECKS};
use crate::engine::left_batch::LeftBatch;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::remains::{Remains, Replied};
use crate::engine::{endings, summary};
use crate::store::{Change, Step};

/// Takes in what an earlier process recorded, and finishes what it had begun. Children that it began are driven to
/// their end even where this run is not to go on: it ends after them. Returns the task's text where only a summary is
/// still to be asked for.
pub async fn replay(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    hands: &Hands,
    left: Remains,
    told: Draft,
    talk: &mut Conversation,
) -> Result<Option<String>, Ending> {
    let Remains {
        replies,
        calls: begun,
        remembers,
        is_compacting,
        ..
    } = left;
    let is_known = matches!(live.left_batch.get(), LeftBatch::Known(_));
    let is_lost = !is_known && begun.last_turn > replies.last().map_or(0, |reply| reply.turn);
    if is_compacting || is_lost {
        // The request that was under way is asked again; what the first one cost nobody will tell.
        live.spend(&Usage {
            unreported: 1,
            ..Usage::default()
        });
    }
    told.write(engine, live).await?;
    let begun = Arc::new(begun);
    let mut summed_up = None;
    for Replied {
        turn,
        message,
        results,
        told,
        compaction,
    } in replies
    {
        if !message.content.is_empty() {
            state.partial = Some(message.content.clone());
        }
        if message.tool_calls.is_empty() {
            if let Some(told) = told {
                summed_up = summary::prompt(live).map(|_| message.content.clone());
                talk.say_more(turn, message, told);
                if let Some(compaction) = compaction {
                    talk.compact(compaction);
                }
                continue;
            }
            let content = match summed_up.take() {
                Some(task) if message.content.trim().is_empty() => task,
                _ => message.content.clone(),
            };
            let checked = final_text::check_again(live, &content, begun.resumed);
            match Box::pin(checked).await? {
                Ok(structured) => {
                    let mut remembers = remembers;
                    if remembers.is_none() && live.agent.memory.enabled {
                        // The earlier process was still checking the reply: from here on the entry has one time.
                        let at = engine.memories.next_time();
                        let step = Step::Remembers { at };
                        let journal = &engine.journal;
                        journal
                            .record(live, Change::Nothing, vec![step], Vec::new())
                            .await?;
                        remembers = Some(at);
                    }
                    return Err(Ending::of(How::Completed {
                        content,
                        structured,
                        task: talk.task().into_owned(),
                        remembers,
                    }));
                }
                Err(errors) if !talk.may_repair() || begun.resumed >= MAX_RESUMED_CHECKS => {
                    return Err(Ending::failed(endings::output_invalid(&errors)));
                }
                Err(errors) => {
                    let told = structured::repair(&errors);
                    let step = Step::Said {
                        content: told.clone(),
                    };
                    let change = Change::Progress(state.progress.clone());
                    engine
                        .journal
                        .record(live, change, vec![step], Vec::new())
                        .await?;
                    talk.say_more(turn, message, told);
                    continue;
                }
            }
        }
        let is_missing = results.iter().any(Option::is_none);
        let is_begun = |call: &ToolCall| {
            begun.started.contains(&call.id) || begun.requested.contains_key(&call.id)
        };
        if is_missing && !message.tool_calls.iter().any(is_begun) {
            // The other process had not come to look whether it may perform them.
            if let Err(error) = check(live) {
                return Err(failed_turn(live, error));
            }
        }
        let calls = message.tool_calls.clone();
        talk.hear_again(turn, message);
        let asked = Asked {
            turn,
            calls,
            results,
            begun: Arc::clone(&begun),
        };
        answer(engine, live, hands, asked, talk).await?;
        if let Some(compaction) = compaction {
            talk.compact(compaction);
        }
    }
    if let Some(tokens) = &begun.reported {
        talk.report(tokens);
    }
    Ok(summed_up)
}

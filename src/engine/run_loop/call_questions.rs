//! What the service of a call asks people before the call ends.

use std::pin::pin;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::domain::input::Question;
use crate::domain::message::ToolCall;
use crate::domain::server_question::{ServerQuestion, ServerQuestions};
use crate::domain::waiting_for::WaitingFor;
use crate::engine::approval::{pause, question};
use crate::engine::cluster::connection;
use crate::engine::context::RunContext;
use crate::engine::history::run_log::{RecordedCalls, SuspendedCall};
use crate::engine::run_loop::call_records::started;
use crate::engine::run_loop::limits;
use crate::engine::state::failures;
use crate::engine::state::pause::PauseReason;
use crate::engine::state::turn_error::TurnError;
use crate::record::entry::Entry;
use crate::store::{Change, StoreError};
use crate::tools::{AnswerToQuestion, AnsweredQuestions, AskRequest, OpenCall};

/// The most questions of one call, and the most rounds of them.
const MAX_QUESTIONS: u32 = 64;
/// The pause before a call is made again for which there was no question; longer by as much each time.
const ROUND_PAUSE: Duration = Duration::from_millis(500);

/// The questions of one call.
pub struct CallQuestions<'a> {
    context: &'a RunContext,
    recorded_calls: &'a RecordedCalls,
    turn: u32,
    call: &'a ToolCall,
    /// How many there were.
    count: u32,
    rounds: u32,
    /// The last ones, after whose answers the call is made again.
    suspended: Option<SuspendedCall>,
    /// With their answers, once these are there.
    answered: Option<AnsweredQuestions>,
}

impl<'a> CallQuestions<'a> {
    pub fn new(
        context: &'a RunContext,
        recorded_calls: &'a RecordedCalls,
        turn: u32,
        call: &'a ToolCall,
    ) -> Self {
        let mut questions = Self {
            context,
            recorded_calls,
            turn,
            call,
            count: 0,
            rounds: 0,
            suspended: recorded_calls.suspended.get(&call.id).cloned(),
            answered: None,
        };
        while questions.is_requested(questions.count + 1) {
            questions.count += 1;
        }
        if let Some(SuspendedCall {
            first, required, ..
        }) = &questions.suspended
        {
            let last = first - 1 + count(required);
            questions.count = questions.count.max(last);
        }
        questions
    }

    fn id(&self, number: u32) -> String {
        format!("{}.input.{number}", self.call.id)
    }

    fn is_requested(&self, number: u32) -> bool {
        let requested = &self.recorded_calls.inputs_requested;
        requested.contains_key(&self.id(number))
    }

    /// Ends the questions of a call that an earlier process had in flight: nobody waits for their answers.
    pub async fn withdraw(&self) -> Result<(), StoreError> {
        for number in 1..=self.count {
            let id = self.id(number);
            if self.recorded_calls.decisions.contains_key(&id) || !self.is_requested(number) {
                continue;
            }
            let withdrawn = CancellationToken::new();
            withdrawn.cancel();
            // Its event has the text.
            let question = Question {
                call_id: self.call.id.clone(),
                text: String::new(),
                schema: None,
                options: Vec::new(),
                server: None,
                begun: None,
            };
            // Why the run ends, if it does, is found again.
            let _ = self.ask(id, question, Some(withdrawn)).await?;
        }
        Ok(())
    }

    /// Records that the call has ended with questions. The error says why nobody is to answer them.
    pub async fn suspend(
        &mut self,
        required: ServerQuestions,
    ) -> Result<Result<(), String>, StoreError> {
        let new = count(&required);
        if let Err(why) = self.count_round(new) {
            return Ok(Err(why));
        }
        let first = self.count + 1;
        let entry = Entry::CallSuspended {
            call_id: self.call.id.clone(),
            first,
            required: required.clone(),
        };
        let RunContext { engine, run } = self.context;
        let recorded = engine.journal.append(run, Change::Unchanged, vec![entry]);
        recorded.await?;
        self.count += new;
        self.answered = None;
        self.suspended = Some(SuspendedCall {
            first,
            required,
            is_made_again: false,
        });
        Ok(Ok(()))
    }

    /// What the call is made again with, `None` if there were no questions: asks what is not answered, and begins the call again. `true` if
    /// it has. The inner error ends the call.
    pub async fn answer(
        &mut self,
    ) -> Result<Result<(Option<&AnsweredQuestions>, bool), String>, StoreError> {
        let run = &self.context.run;
        let mut begins_again = false;
        if let (Some(suspended), None) = (self.suspended.clone(), &self.answered) {
            let required = suspended.required;
            if required.questions.is_empty() && !suspended.is_made_again {
                let pause = tokio::time::sleep(ROUND_PAUSE * self.rounds);
                if let Err(error) = limits::within_deadline(run, pause).await {
                    return Ok(Err(failures::interruption_message(run, &error)));
                }
            }
            let mut answers = Vec::with_capacity(required.questions.len());
            for (number, question) in (suspended.first..).zip(&required.questions) {
                match self
                    .ask(self.id(number), self.question(question), None)
                    .await?
                {
                    Ok(answer) => answers.push(answer),
                    Err(why) => return Ok(Err(why)),
                }
            }
            if !suspended.is_made_again {
                match begin_again(self.context, self.turn, self.call).await {
                    Ok(()) => begins_again = true,
                    Err(TurnError::Store(error)) => return Err(error),
                    Err(error) => return Ok(Err(failures::interruption_message(run, &error))),
                }
            }
            self.answered = Some(AnsweredQuestions { required, answers });
        }
        Ok(Ok((self.answered.as_ref(), begins_again)))
    }

    /// Asks what the service of a call in flight asks. The answer is `None` if the service does not wait for it any more; the inner
    /// error ends the call.
    pub async fn ask_open(
        &mut self,
        question: &ServerQuestion,
        call: &mut dyn OpenCall,
    ) -> Result<Result<Option<AnswerToQuestion>, String>, StoreError> {
        if let Err(why) = self.count_round(1) {
            return Ok(Err(why));
        }
        self.count += 1;
        let withdrawn = CancellationToken::new();
        let (id, question) = (self.id(self.count), self.question(question));
        let mut asking = pin!(self.ask(id, question, Some(withdrawn.clone())));
        tokio::select! {
            biased;
            answer = &mut asking => Ok(answer?.map(Some)),
            () = call.lapsed() => {
                withdrawn.cancel();
                Ok(asking.await?.map(|_| None))
            }
        }
    }

    fn count_round(&mut self, questions: u32) -> Result<(), String> {
        self.rounds += 1;
        let run = &self.context.run;
        if self.context.playback().is_some() || run.tree.played().is_some() {
            return Err("the tool's server asks a person, and a test has none".to_owned());
        }
        match self.rounds.max(self.count.saturating_add(questions)) <= MAX_QUESTIONS {
            true => Ok(()),
            false => Err(format!(
                "the tool's server has more than {MAX_QUESTIONS} questions"
            )),
        }
    }

    fn question(&self, question: &ServerQuestion) -> Question {
        Question {
            call_id: self.call.id.clone(),
            text: question.text.clone(),
            schema: Some(question.schema.clone()),
            options: Vec::new(),
            server: Some(question.server.clone()),
            begun: None,
        }
    }

    async fn ask(
        &self,
        id: String,
        question: Question,
        withdrawn: Option<CancellationToken>,
    ) -> Result<Result<AnswerToQuestion, String>, StoreError> {
        let request = AskRequest {
            id,
            question,
            withdrawn,
        };
        let asking = question::ask(self.context, self.recorded_calls, self.turn, request);
        Box::pin(asking).await
    }
}

fn count(required: &ServerQuestions) -> u32 {
    u32::try_from(required.questions.len()).unwrap_or(u32::MAX)
}

/// Records that a call is begun again. A process that resumes the run finds that its end is not known.
pub async fn begin_again(
    context: &RunContext,
    turn: u32,
    call: &ToolCall,
) -> Result<(), TurnError> {
    let held = PauseReason::Call(WaitingFor::Resume);
    pause::wait_while_held(context, held).await?;
    let entries = vec![started(turn, call).into()];
    let journal = &context.engine.journal;
    let recorded = journal.append(&context.run, Change::Unchanged, entries);
    recorded.await.map_err(TurnError::Store)?;
    let connected = connection::wait_until_connected(context).await;
    connected.map_err(TurnError::Store)
}

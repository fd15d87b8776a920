//! The statements of a write: first the one that says whether it is possible, then what belongs to it.

use std::collections::HashMap;

use uuid::Uuid;

use crate::domain::attachment::Attachment;
use crate::domain::calendar::QUARTERS_PER_DAY;
use crate::domain::period_budget::BudgetCharge;
use crate::domain::run::RunId;
use crate::domain::webhook::DeliveryId;
use crate::ssrf;
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::encoding::input_changes::InputChange;
use crate::store::encoding::integers::signed;
use crate::store::encoding::notified_event::NotifiedEvent;
use crate::store::postgres::connection::Query;
use crate::store::postgres::run_changes::{self, Ownership};
use crate::store::postgres::run_inserts::{self, RunInserts};
use crate::store::postgres::statements::Sql;
use crate::store::sql::value::{NamedValue, free_text, values};
use crate::store::usage::{KEPT_BUDGET_DAYS, SETTLED_BUDGET_DAYS};
use crate::store::{Change, NewDelivery};

/// What the writer remembers from one write to the next. After a rollback it is reset.
pub struct WriteMemory {
    pub inserts: RunInserts,
    /// The quarter hour of each budget whose old rows were removed last.
    trimmed_budgets: HashMap<String, i64>,
    /// Who charges budgets: this process, whatever node it is.
    budget_writer: Uuid,
}

/// Where the outcomes of a write are, among those of its transaction.
#[derive(Clone, Copy, Debug)]
pub struct WriteQueries {
    /// The statement of [`Sql`] that changes the run. It returns the number of the last event.
    pub main: usize,
    /// The one that finds the receivers of push notifications.
    pub push_targets: Option<usize>,
}

impl WriteMemory {
    pub fn new(budget_writer: Uuid) -> Self {
        Self {
            inserts: RunInserts::default(),
            trimmed_budgets: HashMap::new(),
            budget_writer,
        }
    }

    pub fn reset(&mut self) {
        self.inserts.reset();
        self.trimmed_budgets.clear();
    }

    /// Adds the statements of a write without its others.
    pub fn plan<'a>(
        &mut self,
        write: &'a EncodedWrite,
        owner: Ownership,
        queries: &mut Vec<Query<'a>>,
    ) -> WriteQueries {
        let main = queries.len();
        if let Change::Create(new_run) = &write.change {
            self.inserts.insert(write, new_run, owner, queries);
        } else {
            queries.push(run_changes::change(write, owner));
        }
        if let Some((claim, number)) = write.change.request_claim() {
            run_inserts::insert_claim(claim, write.run, Some(number), queries);
        }
        if let Change::Finish(finished) = &write.change {
            queries.extend(finished.scorers.iter().map(|scorer| {
                let values = values! {":run": write.run, ":scorer": scorer};
                Query::new(Sql::InsertScoring, values.into())
            }));
        }
        for delivery in &write.deliveries {
            queries.extend(alert_delivery(write.run, delivery));
        }
        self.charge_budgets(charges(&write.change), queries);
        if let Some(warnings) = &write.warnings {
            let values = values! {":run": write.run, ":warnings": warnings};
            queries.push(Query::new(Sql::UpdateWarnings, values.into()));
        }
        for shared in &write.shared_texts {
            queries.extend(self.inserts.store_definition(&shared.text, write.run).1);
        }
        let inputs = write.inputs.iter();
        queries.extend(inputs.map(|change| input(write, change)));
        for attachment in &write.attachments {
            insert_attachment(write.run, attachment, queries);
        }
        let deliveries = write.deliveries.iter().filter(|it| it.alert.is_none());
        queries.extend(deliveries.map(|delivery| insert_delivery(write.run, delivery)));
        let push_targets = write.notified_event.map(|_| {
            let values = values! {":run": write.root};
            queries.push(Query::new(Sql::PushTargets, values.into()));
            queries.len() - 1
        });
        WriteQueries { main, push_targets }
    }

    /// Adds what the write is charged to budgets over time.
    fn charge_budgets<'a>(&mut self, charges: &'a [BudgetCharge], queries: &mut Vec<Query<'a>>) {
        for charge in charges {
            let values = values! {
                ":budget": &charge.budget,
                ":quarter": charge.quarter,
                ":writer": self.budget_writer,
                ":tokens": signed(charge.tokens),
                ":cost": signed(charge.cost),
            };
            queries.push(Query::new(Sql::ChargeBudget, values.into()));
            for share in &charge.alerts {
                let values = values! {
                    ":budget": &charge.budget, ":period": charge.period_start, ":share": *share,
                };
                queries.push(Query::new(Sql::InsertBudgetAlert, values.into()));
            }
            let trimmed = self
                .trimmed_budgets
                .insert(charge.budget.clone(), charge.quarter);
            if trimmed != Some(charge.quarter) {
                let old = values! {
                    ":budget": &charge.budget,
                    ":before": charge.quarter - KEPT_BUDGET_DAYS * QUARTERS_PER_DAY,
                    ":settled": charge.quarter - SETTLED_BUDGET_DAYS * QUARTERS_PER_DAY,
                };
                queries.push(Query::new(Sql::TrimBudgetUsage, old.to_vec()));
                queries.push(Query::new(Sql::TrimBudgetAlerts, old.into()));
            }
        }
    }
}

fn charges(change: &Change) -> &[BudgetCharge] {
    match change {
        Change::Progress(progress) => &progress.charges,
        Change::Finish(finished) => &finished.progress.charges,
        _ => &[],
    }
}

fn input<'a>(write: &'a EncodedWrite, change: &'a InputChange) -> Query<'a> {
    match change {
        InputChange::Requested {
            index,
            call,
            kind,
            request,
            wake,
        } => {
            let later = write.event_count().saturating_sub(*index as u64 + 1);
            let values = values! {
                ":run": write.run, ":back": signed(later), ":call": free_text(call),
                ":kind": kind.as_str(), ":request": request, ":wake": wake.as_deref().map(free_text),
            };
            Query::new(Sql::InsertInput, values.into())
        }
        InputChange::Decided { call } => {
            let values = values! {":run": write.run, ":call": free_text(call)};
            Query::new(Sql::DeleteInput, values.into())
        }
    }
}

/// Nothing is stored if the attachment has no bytes and another run, that had them, was deleted in the meantime: this run
/// continues without them.
fn insert_attachment<'a>(run: RunId, attachment: &'a Attachment, queries: &mut Vec<Query<'a>>) {
    let hash = &attachment.sha256.0;
    if let Some(data) = &attachment.data {
        let values = values! {":hash": hash, ":data": &data[..]};
        queries.push(Query::new(Sql::InsertAttachment, values.into()));
    }
    let values = values! {":run": run, ":hash": hash};
    queries.push(Query::new(Sql::InsertAttachmentUse, values.into()));
}

fn insert_delivery(run: RunId, delivery: &NewDelivery) -> Query<'_> {
    Query::new(Sql::InsertDelivery, delivery_values(run, delivery).into())
}

/// The delivery of a budget's alert, unless the alert was recorded before: several nodes may reach a share at the same time.
fn alert_delivery(run: RunId, delivery: &NewDelivery) -> Option<Query<'_>> {
    let alert = delivery.alert.as_ref()?;
    let mut values = delivery_values(run, delivery).to_vec();
    values.extend(values! {
        ":budget": &alert.budget, ":period": alert.period_start, ":share": alert.share,
    });
    Some(Query::new(Sql::InsertAlertDelivery, values))
}

fn delivery_values(run: RunId, delivery: &NewDelivery) -> [NamedValue<'_>; 9] {
    let webhook = &delivery.webhook;
    values! {
        ":id": delivery.id.0,
        ":run": run,
        ":event": delivery.event,
        ":host": ssrf::host_of(&webhook.url),
        ":url": free_text(&webhook.url),
        ":secret_env": webhook.secret_env.as_deref(),
        ":body": free_text(&delivery.body),
        ":created_at": delivery.created_at.as_millisecond(),
        ":push": None::<&[u8]>,
    }
}

/// A push notification. Its body is made when it is sent: it says nothing but the state.
pub fn insert_notification(
    run: RunId,
    config: Vec<u8>,
    url: Vec<u8>,
    event: NotifiedEvent,
) -> Query<'static> {
    let values = values! {
        ":id": DeliveryId::new().0,
        ":run": run,
        ":event": event.name.as_str(),
        ":host": ssrf::host_of(&String::from_utf8_lossy(&url)),
        ":url": url,
        ":secret_env": None::<&str>,
        ":body": free_text(""),
        ":created_at": event.time.as_millisecond(),
        ":push": config,
    };
    Query::new(Sql::InsertDelivery, values.into())
}

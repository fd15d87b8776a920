//! `/ui/approvals`: the tool calls and questions that wait for a person.

use maud::html;

use crate::config::KeyScope::{Approve, Run};
use crate::domain::run::RunId;
use crate::store::inputs::InputQuery;
use crate::web::console::layout::Page;
use crate::web::console::pages::approval_cards;
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query::{Cursor, PageQuery};
use crate::web::routes::approvals;

const PAGE_SIZE: usize = 50;

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let page: PageQuery<RunId> = request.query()?;
    let query = InputQuery {
        after: page.cursor.map(|Cursor(id)| id),
        limit: PAGE_SIZE,
        ..InputQuery::default()
    };
    let mut page = approvals::visible_page(&request.state, &request.principal, query).await?;
    approvals::complete_arguments(&request.state, &mut page.inputs).await?;
    let next = page.next.map(|next| {
        let query = query_string(&[("cursor", &next.to_string())]);
        format!("{}?{query}", request.href("/approvals"))
    });
    let cards = approval_cards::of_runs(request, &page.inputs).await?;
    let body = html! {
        div.head { h1 { "Approvals" } }
        @if request.may(Run) || request.may(Approve) { (parts::needs_scripts("Deciding")) }
        h2.sr { "Calls and questions that wait" }
        div #list data-live="3000" {
            (cards)
            @if page.inputs.is_empty() {
                (parts::empty_with("Nothing waits for a person", "Calls of tools listed under approve in an agent's file wait here for your decision, and questions of agents with [ask] for your answer:", "approve = [\"write_file\"]\n\n[ask]\nenabled = true"))
            }
            (parts::next_page(next))
        }
    };
    Ok(Page::new("Approvals", "Approvals", body))
}

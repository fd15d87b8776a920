//! A run for a list: its long texts are cut.

use crate::domain::content::{Content, Part};
use crate::domain::message::truncate_to_bytes;
use crate::domain::run::Run;

/// Longer texts are cut.
const MAX_TEXT_BYTES: usize = 1 << 10;
/// What is left of a text that is cut. A page of 50 such runs is below 100 KB.
const EXCERPT_BYTES: usize = 256;
/// Most parts of an input.
const MAX_PARTS: usize = 8;
/// Most pending approvals.
const MAX_APPROVALS: usize = 10;

/// Cuts the texts of more than 1 KiB, and sets [`Run::is_cut`] if there are any.
pub fn cut_texts(run: &mut Run) {
    let mut is_cut = cut_input(&mut run.input);
    if run.content.as_mut().is_some_and(cut) {
        // JSON that is cut is no JSON.
        run.structured = false;
        is_cut = true;
    }
    let texts = [
        &mut run.partial_content,
        &mut run.task,
        &mut run.label,
        &mut run.cancel_reason,
    ];
    for text in texts.into_iter().flatten() {
        is_cut |= cut(text);
    }
    if let Some(failure) = &mut run.error {
        is_cut |= cut(&mut failure.message);
    }
    for warning in &mut run.warnings {
        is_cut |= cut(&mut warning.message);
    }
    is_cut |= run.pending_inputs.len() > MAX_APPROVALS;
    run.pending_inputs.truncate(MAX_APPROVALS);
    for approval in &mut run.pending_inputs {
        let request = &mut approval.request;
        if request.arguments.get().len() > MAX_TEXT_BYTES {
            request.cut_arguments_to(EXCERPT_BYTES);
            is_cut = true;
        }
    }
    run.is_cut |= is_cut;
}

fn cut(text: &mut String) -> bool {
    let is_long = text.len() > MAX_TEXT_BYTES;
    if is_long {
        *text = truncate_to_bytes(text, EXCERPT_BYTES).to_owned();
    }
    is_long
}

fn cut_input(input: &mut Content) -> bool {
    let parts = match input {
        Content::Text(text) => return cut(text),
        Content::Parts(parts) => parts,
    };
    let is_long = parts.len() > MAX_PARTS
        || parts.iter().map(Part::text_bytes).sum::<usize>() > MAX_TEXT_BYTES;
    if is_long {
        parts.truncate(MAX_PARTS);
        let mut remaining = EXCERPT_BYTES;
        for part in parts {
            if let Part::Text { text } = part {
                *text = truncate_to_bytes(text, remaining).to_owned();
                remaining -= text.len();
            }
        }
    }
    is_long
}

#[cfg(test)]
mod tests {
    use super::cut_texts;
    use crate::domain::content::{Content, Part};
    use crate::domain::run::{Run, RunId, Scope};

    fn run(input: Content, content: &str) -> Run {
        Run {
            input,
            content: Some(content.to_owned()),
            structured: true,
            ..Run::queued(&Scope::root(RunId::new(), None), "a".to_owned())
        }
    }

    #[test]
    fn only_texts_above_a_kilobyte_are_cut() {
        let text = "ä".repeat(512);
        let mut short = run(Content::Text(text.clone()), &text);
        let before = short.clone();
        cut_texts(&mut short);
        assert_eq!(short, before);
        let mut long = run(Content::Text(text.clone()), &format!("{text}!"));
        cut_texts(&mut long);
        assert_eq!(long.input, before.input);
        assert_eq!(long.content.as_deref(), Some("ä".repeat(128).as_str()));
        assert!(long.is_cut && !long.structured);
    }

    #[test]
    fn parts_share_the_length() {
        let part = |length: usize| Part::Text {
            text: "x".repeat(length),
        };
        let mut long = run(Content::Parts(vec![part(200), part(900), part(1)]), "");
        cut_texts(&mut long);
        assert_eq!(
            long.input,
            Content::Parts(vec![part(200), part(56), part(0)])
        );
    }
}

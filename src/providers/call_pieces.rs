//! Puts the pieces of tool calls together, in the many ways in which services send them: with equal or missing indexes or ids,
//! with a placeholder before the arguments, or with the whole arguments again after their pieces. Pure.

use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::message::{InvalidArguments, ReplyLimit, ToolCall, empty_arguments};
use crate::providers::tool_call_codec::{self, Arguments};
use crate::providers::{ProviderError, stop_reason};

/// A tool call, or a part of one.
#[derive(Default)]
pub struct CallPiece {
    pub index: Option<u64>,
    /// Empty if it has none.
    pub id: String,
    /// Empty if it has none.
    pub name: String,
    pub arguments: String,
    pub extra_content: Option<Box<RawValue>>,
}

impl CallPiece {
    pub fn new(index: Option<u64>, id: Option<String>, name: Option<String>) -> Self {
        let id = id.filter(|id| !stop_reason::is_placeholder(id));
        Self {
            index,
            id: id.unwrap_or_default(),
            name: name.unwrap_or_default(),
            ..Self::default()
        }
    }

    /// The arguments are a JSON text, or an object.
    pub fn with_arguments(mut self, json: Option<&RawValue>) -> Self {
        self.arguments = json.map(argument_text).unwrap_or_default();
        self
    }

    fn begins_arguments(&self) -> bool {
        self.arguments.trim_start().starts_with('{')
    }
}

/// The text of a call's arguments, or of a piece of them.
pub fn argument_text(json: &RawValue) -> String {
    let json = json.get();
    match json.starts_with('"') {
        true => serde_json::from_str(json).unwrap_or_default(),
        false if json == "null" || json == "false" => String::new(),
        false => json.to_owned(),
    }
}

/// The calls of a reply.
#[derive(Default)]
pub struct CallPieces {
    calls: Vec<PartialCall>,
    /// Calls that began in an earlier message of the stream.
    earlier: usize,
}

#[derive(Default)]
struct PartialCall {
    index: Option<u64>,
    id: String,
    name: String,
    arguments: ArgumentText,
    extra_content: Option<Box<RawValue>>,
}

impl CallPieces {
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// The next pieces come in another message.
    pub fn begin_message(&mut self) {
        self.earlier = self.calls.len();
    }

    /// Adds a call that is whole.
    ///
    /// # Errors
    /// The reply has too many calls.
    pub fn push_new(&mut self, piece: CallPiece) -> Result<(), ProviderError> {
        tool_call_codec::check_call_count(self.calls.len() + 1)?;
        let mut call = PartialCall {
            index: piece.index,
            ..PartialCall::default()
        };
        call.add(piece);
        self.calls.push(call);
        Ok(())
    }

    /// Adds a piece of a call to it.
    ///
    /// # Errors
    /// The reply has too many calls.
    pub fn push(&mut self, piece: CallPiece) -> Result<(), ProviderError> {
        match self.position(&piece) {
            Some(at) => self.calls[at].add(piece),
            None => self.push_new(piece)?,
        }
        Ok(())
    }

    /// Adds the call at this position of a list of all calls so far, whose pieces may have arrived already.
    ///
    /// # Errors
    /// The reply has too many calls.
    pub fn push_snapshot(
        &mut self,
        position: usize,
        piece: CallPiece,
    ) -> Result<(), ProviderError> {
        let by_id = (self.calls.iter()).rposition(|it| !piece.id.is_empty() && it.id == piece.id);
        let at_position = || {
            let call = self.calls.get(position)?;
            let is_same = call.name == piece.name && (call.id.is_empty() || piece.id.is_empty());
            is_same.then_some(position)
        };
        match by_id.or_else(at_position) {
            Some(at) => self.calls[at].arguments.push_whole(piece.arguments),
            None => self.push_new(piece)?,
        }
        Ok(())
    }

    /// The call that the piece belongs to; `None` if it begins one. Ids say more than indexes, which some services give all calls
    /// alike or count by pieces.
    fn position(&self, piece: &CallPiece) -> Option<usize> {
        let same_id = |call: &PartialCall| !piece.id.is_empty() && call.id == piece.id;
        if let Some(at) = self.calls.iter().rposition(same_id) {
            let is_other = piece.begins_arguments()
                && !piece.name.is_empty()
                && self.calls[at].is_whole()
                && !self.calls[at].is_same(piece);
            return (!is_other).then_some(at);
        }
        let last = self.calls.len().checked_sub(1);
        let at_index = match piece.index {
            Some(_) => self.calls.iter().rposition(|it| it.index == piece.index),
            None => last,
        };
        let is_nameless = piece.id.is_empty() && piece.name.is_empty();
        let continues_last = || last.filter(|at| is_nameless && self.calls[*at].is_open());
        let at = at_index.or_else(continues_last)?;
        let call = &self.calls[at];
        let is_unnamed = call.id.is_empty() && call.name.is_empty();
        if is_nameless || is_unnamed || piece.name.is_empty() {
            return Some(at);
        }
        let continues = call.is_open() && !piece.begins_arguments();
        let is_other = match (call.id.is_empty(), piece.id.is_empty()) {
            // Some services give each piece another id.
            (false, false) => call.name != piece.name || !continues || call.arguments.is_blank(),
            _ if call.name != piece.name => !call.name.is_empty() && !call.arguments.is_blank(),
            _ if !piece.begins_arguments() => false,
            _ if call.is_whole() => at >= self.earlier || !call.is_same(piece),
            _ => call.arguments.is_closed() && piece.index.is_none(),
        };
        (!is_other).then_some(at)
    }

    /// The calls, each with what the service wants back with it. `limit` is the limit that the reply has reached.
    pub fn finish(
        self,
        limit: Option<ReplyLimit>,
    ) -> impl Iterator<Item = (ToolCall, Option<Box<RawValue>>)> {
        let count = self.calls.len();
        let calls = self.calls.into_iter().enumerate();
        calls.map(move |(position, call)| {
            let limit = limit.map(|limit| (limit, position + 1 == count));
            let (arguments, invalid_arguments) = call.arguments.finish(limit);
            let tool_call = ToolCall {
                id: call.id,
                provider_id: String::new(),
                name: call.name,
                arguments,
                invalid_arguments,
            };
            (tool_call, call.extra_content)
        })
    }
}

impl PartialCall {
    fn add(&mut self, piece: CallPiece) {
        if self.id.is_empty() {
            self.id = piece.id;
        }
        // Some services repeat the name in every piece, others send it in pieces.
        if self.name != piece.name && (self.name.is_empty() || self.arguments.is_blank()) {
            self.name.push_str(&piece.name);
        }
        self.arguments.push(&piece.arguments);
        self.extra_content = piece.extra_content.or(self.extra_content.take());
    }

    /// Whether its arguments are complete and no placeholder.
    fn is_whole(&self) -> bool {
        self.arguments.is_closed() && !self.arguments.is_placeholder()
    }

    /// Whether its arguments are not complete, perhaps because they have not begun.
    fn is_open(&self) -> bool {
        !self.arguments.is_closed()
    }

    /// Whether the piece repeats the whole call.
    fn is_same(&self, piece: &CallPiece) -> bool {
        let value = |text: &str| serde_json::from_str::<Value>(text).ok();
        let arguments = &self.arguments.text;
        self.name == piece.name
            && (arguments.trim() == piece.arguments.trim()
                || value(arguments).is_some_and(|it| Some(it) == value(&piece.arguments)))
    }
}

/// The text of a call's arguments, as far as it has arrived.
#[derive(Default)]
pub struct ArgumentText {
    text: String,
    /// The whole arguments, if they came after pieces.
    whole: Option<String>,
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
}

impl ArgumentText {
    pub fn push(&mut self, piece: &str) {
        let is_repeat = !self.text.is_empty() && is_filled_object(piece);
        if is_repeat {
            self.whole = Some(piece.to_owned());
        }
        for byte in piece.bytes() {
            match byte {
                _ if std::mem::take(&mut self.is_escaped) => {}
                b'\\' => self.is_escaped = self.is_in_string,
                b'"' => self.is_in_string = !self.is_in_string,
                _ if self.is_in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        self.text.push_str(piece);
    }

    /// Adds the whole arguments, whose pieces may have arrived already.
    pub fn push_whole(&mut self, text: String) {
        if is_filled_object(&text) {
            self.whole = Some(text);
        } else if self.is_blank() {
            self.push(&text);
        }
    }

    pub fn is_blank(&self) -> bool {
        self.whole.is_none() && self.text.trim().is_empty()
    }

    fn is_closed(&self) -> bool {
        self.depth == 0 && !self.is_in_string && self.text.contains('{')
    }

    fn is_placeholder(&self) -> bool {
        self.whole.is_none() && self.text.len() < 10 && is_empty_object(&self.text)
    }

    /// The arguments so far.
    pub fn object(&self) -> Arc<RawValue> {
        match tool_call_codec::read_arguments(&self.text) {
            Arguments::Object(object) => object,
            Arguments::Incomplete | Arguments::Other => empty_arguments(),
        }
    }

    /// The arguments, and what came instead of an object. `limit` is the limit that the reply has reached, and whether the call
    /// is the last.
    pub fn finish(
        self,
        limit: Option<(ReplyLimit, bool)>,
    ) -> (Arc<RawValue>, Option<InvalidArguments>) {
        let is_blank = self.is_blank();
        let whole = self
            .whole
            .map(|text| tool_call_codec::read_arguments(&text));
        let is_cut = match (tool_call_codec::read_arguments(&self.text), whole) {
            (Arguments::Object(text), _) if !is_empty_object(text.get()) => return (text, None),
            (_, Some(Arguments::Object(whole))) | (Arguments::Object(whole), _) => {
                return (whole, None);
            }
            (Arguments::Incomplete, _) => true,
            (Arguments::Other, _) => is_blank && limit.is_some_and(|(_, is_last)| is_last),
        };
        let invalid = match limit {
            Some((limit, _)) if is_cut => Some(InvalidArguments::CutBy(limit)),
            _ if is_blank || self.text.trim() == "null" => None,
            _ => Some(InvalidArguments::Text(self.text.into())),
        };
        (empty_arguments(), invalid)
    }
}

pub fn is_empty_object(text: &str) -> bool {
    let inner = text
        .trim()
        .strip_prefix('{')
        .and_then(|it| it.strip_suffix('}'));
    inner.is_some_and(|inner| inner.trim().is_empty())
}

fn is_filled_object(text: &str) -> bool {
    let text = text.trim();
    text.starts_with('{')
        && text.ends_with('}')
        && !is_empty_object(text)
        && serde_json::from_str::<&RawValue>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::{ArgumentText, CallPiece, CallPieces};
    use crate::domain::message::{InvalidArguments, ReplyLimit};

    const A: &str = r#"{"path":"a"}"#;
    const B: &str = r#"{"path":"b"}"#;

    /// Index, id, name, arguments.
    type Piece = (Option<u64>, &'static str, &'static str, &'static str);

    /// The calls of these messages, each a list of pieces.
    fn assemble(messages: &[&[Piece]]) -> Vec<String> {
        let mut calls = CallPieces::default();
        for message in messages {
            calls.begin_message();
            for (index, id, name, arguments) in *message {
                let name = Some((*name).to_owned());
                let mut piece = CallPiece::new(*index, Some((*id).to_owned()), name);
                (*arguments).clone_into(&mut piece.arguments);
                calls.push(piece).expect("few calls");
            }
        }
        let calls = calls.finish(None);
        calls
            .map(|(call, _)| format!("{}:{}{}", call.id, call.name, call.arguments))
            .collect()
    }

    #[test]
    fn pieces_are_put_together_by_id_first() {
        let zero = Some(0);
        let both = [format!("k:read{A}"), format!("l:list{B}")];
        let anonymous = [format!(":read{A}"), format!(":list{B}")];
        // Interleaved, by equal and by missing indexes.
        for index in [zero, None] {
            let pieces: &[&[_]] = &[
                &[(index, "k", "read", "")],
                &[(index, "l", "list", "")],
                &[
                    (index, "k", "", "{\"path\":"),
                    (index, "l", "", "{\"path\":"),
                ],
                &[(index, "l", "", "\"b\"}")],
                &[(index, "k", "", "\"a\"}")],
            ];
            assert_eq!(assemble(pieces), both);
            for id in ["", "null"] {
                assert_eq!(
                    assemble(&[&[(index, id, "read", A)], &[(index, id, "list", B)]]),
                    anonymous
                );
                assert_eq!(
                    assemble(&[&[(index, id, "read", A), (index, id, "list", B)]]),
                    anonymous
                );
            }
            let same_tool = [format!(":read{A}"), format!(":read{B}")];
            assert_eq!(
                assemble(&[&[(index, "", "read", A)], &[(index, "", "read", B)]]),
                same_tool
            );
        }
        // By index alone, and with an index that counts pieces.
        assert_eq!(
            assemble(&[
                &[(zero, "k", "read", ""), (Some(1), "l", "list", "")],
                &[
                    (Some(1), "", "", "{\"path\":"),
                    (zero, "", "", "{\"path\":")
                ],
                &[(zero, "", "", "\"a\"}"), (Some(1), "", "", "\"b\"}")],
            ]),
            both
        );
        assert_eq!(
            assemble(&[
                &[(zero, "k", "read", "")],
                &[(Some(1), "", "", "{\"path\"")],
                &[(Some(2), "", "", ":\"a\"}")],
                &[(Some(3), "l", "list", B)],
            ]),
            both
        );
        // Each piece has another id.
        assert_eq!(
            assemble(&[
                &[(zero, "k", "read", "{\"path\"")],
                &[(zero, "x", "read", ":\"a\"")],
                &[(zero, "y", "", "}")],
                &[(Some(1), "l", "list", B)],
            ]),
            both
        );
        // Two calls have the same id.
        assert_eq!(
            assemble(&[&[(zero, "k", "read", A)], &[(Some(1), "k", "list", B)]]),
            [format!("k:read{A}"), format!("k:list{B}")]
        );
    }

    #[test]
    fn placeholders_and_repeats_are_no_arguments() {
        let zero = Some(0);
        let one = [format!("k:read{A}")];
        let streams: [&[&[_]]; 5] = [
            &[
                &[(zero, "k", "read", "{}")],
                &[(zero, "", "", "{\"path\":")],
                &[(zero, "", "", "\"a\"}")],
            ],
            &[&[(zero, "k", "read", "{}")], &[(zero, "k", "read", A)]],
            &[&[(zero, "k", "read", "null")], &[(zero, "k", "", A)]],
            &[
                &[(zero, "k", "read", "{\"path\":")],
                &[(zero, "", "", "\"a\"}")],
                &[(zero, "k", "read", A)],
            ],
            &[
                &[(zero, "k", "re", "")],
                &[(zero, "", "ad", "")],
                &[(zero, "", "", A)],
                &[(zero, "", "", "")],
            ],
        ];
        for stream in streams {
            assert_eq!(assemble(stream), one);
        }
        let spaced = "{ \"path\": \"a\" }";
        assert_eq!(
            assemble(&[&[(zero, "k", "read", A)], &[(zero, "k", "read", spaced)]]),
            [format!("k:read{spaced}")]
        );
        // An object may be a piece of the arguments.
        assert_eq!(
            assemble(&[
                &[(zero, "k", "read", "{\"all\":[")],
                &[(zero, "", "", A)],
                &[(zero, "", "", "]}")],
            ]),
            [format!("k:read{{\"all\":[{A}]}}")]
        );
    }

    #[test]
    fn a_snapshot_completes_the_calls() {
        let mut calls = CallPieces::default();
        let piece = |id: &str, name: &str, arguments: &str| CallPiece {
            id: id.to_owned(),
            name: name.to_owned(),
            arguments: arguments.to_owned(),
            ..CallPiece::default()
        };
        calls.push(piece("k", "read", "{\"pa")).expect("few");
        calls.push_snapshot(0, piece("k", "read", A)).expect("few");
        calls.push_snapshot(1, piece("", "list", B)).expect("few");
        calls.push_snapshot(1, piece("", "list", B)).expect("few");
        let calls: Vec<_> = calls.finish(None).map(|(call, _)| call).collect();
        assert_eq!(calls.len(), 2);
        assert_eq!(calls[0].arguments.get(), A);
        assert_eq!(calls[1].arguments.get(), B);
    }

    #[test]
    fn only_incomplete_arguments_are_cut_by_a_limit() {
        let limit = ReplyLimit::Tokens;
        let finish = |pieces: &[&str], is_last| {
            let mut text = ArgumentText::default();
            pieces.iter().for_each(|piece| text.push(piece));
            let (arguments, invalid) = text.finish(Some((limit, is_last)));
            let is_cut = invalid == Some(InvalidArguments::CutBy(limit));
            (arguments.get().to_owned(), is_cut)
        };
        let empty = |is_cut| ("{}".to_owned(), is_cut);
        assert_eq!(finish(&["{\"path\":\"a"], false), empty(true));
        assert_eq!(finish(&["{}", "{\"path\":"], true), empty(true));
        assert_eq!(finish(&[""], true), empty(true));
        assert_eq!(finish(&[""], false), empty(false));
        assert_eq!(finish(&["{}"], true), empty(false));
        assert_eq!(finish(&["[1]"], true), empty(false));
        assert_eq!(finish(&[A], true), (A.to_owned(), false));
        assert_eq!(finish(&[A, "{\"pa"], true), (A.to_owned(), false));
    }

    #[test]
    fn arguments_that_are_no_object_stay_as_they_came() {
        let finish = |pieces: &[&str]| {
            let mut text = ArgumentText::default();
            pieces.iter().for_each(|piece| text.push(piece));
            let (arguments, invalid) = text.finish(None);
            assert_eq!(arguments.get(), "{}", "{pieces:?}");
            invalid
        };
        for pieces in [
            &["{\"path\":"][..],
            &["Bonn, ", "please"],
            &["{'city': 'Bonn'}"],
            &["[1]"],
            &["\"Bonn\""],
        ] {
            let sent = pieces.concat();
            assert_eq!(finish(pieces), Some(InvalidArguments::Text(sent.into())));
        }
        let mut written = ArgumentText::default();
        written.push(r#""{\"path\": \"a\"}""#);
        let (arguments, invalid) = written.finish(None);
        assert_eq!((arguments.get(), invalid), (r#"{"path": "a"}"#, None));
        for nothing in [&[""][..], &[" "], &["null"], &["{}"], &[]] {
            assert_eq!(finish(nothing), None, "{nothing:?}");
        }
    }
}

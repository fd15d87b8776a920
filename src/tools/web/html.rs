//! Converts HTML to Markdown token by token. There is no tree, so time and memory are linear in the input, however deep
//! it nests.

use std::borrow::Cow;

use html5gum::{DefaultEmitter, StartTag, Token, Tokenizer};
use url::Url;

use crate::domain::message::truncate_to_bytes;
use crate::tools::web::html_reader::BoundedReader;

/// Deeper lists and quotes are not indented further, because an indent costs its width on every line.
const MAX_INDENT_LEVELS: usize = 8;
/// A link with a longer URL is left out.
const MAX_URL_BYTES: usize = 2048;

/// Returns the page as Markdown, truncated to `max_bytes` or before a tag with too many attributes, and whether it was
/// truncated. `base` is the page's own URL, which relative links are resolved against.
pub fn to_markdown(html: &str, base: Option<&Url>, max_bytes: usize) -> (String, bool) {
    let mut emitter = DefaultEmitter::default();
    // The contents of scripts and styles are not HTML.
    emitter.naively_switch_states(true);
    let tokens: Tokenizer<BoundedReader<'_>, DefaultEmitter> =
        Tokenizer::new_with_emitter(BoundedReader::new(html), emitter);
    let mut writer = MarkdownWriter::new(base);
    for token in tokens {
        let Ok(token) = token else {
            return (writer.finish(max_bytes), true);
        };
        match token {
            Token::StartTag(tag) => writer.start_tag(&tag),
            Token::EndTag(tag) => writer.end_tag(&lossy_text(&tag.name)),
            Token::String(text) => writer.push_text(&lossy_text(&text)),
            Token::Comment(_) | Token::Doctype(_) | Token::Error(_) => {}
        }
        if writer.output.len() > max_bytes {
            return (writer.finish(max_bytes), true);
        }
    }
    (writer.finish(max_bytes), false)
}

fn lossy_text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

struct MarkdownWriter<'a> {
    output: String,
    base: Option<&'a Url>,
    /// The element whose content is left out, and how many of the same name are open within it.
    hidden: Option<(String, usize)>,
    /// The next item's number for each open list; `None` for a list without numbers.
    lists: Vec<Option<u64>>,
    quote_depth: usize,
    /// The quote depth of the last text.
    last_quote_depth: usize,
    /// How many `pre` elements are open.
    pre_depth: usize,
    /// The target of the open link, and where its text begins.
    link: Option<(String, usize)>,
    /// Line breaks to write before the next text.
    pending_newlines: usize,
    /// Whether to write a space before the next text.
    needs_space: bool,
    /// What the next text's line begins with, such as an item's mark.
    line_prefix: String,
    /// How many cells of the open table row have begun.
    row_cells: Option<usize>,
    /// Whether a row of the open table was written.
    has_rows: bool,
}

impl<'a> MarkdownWriter<'a> {
    fn new(base: Option<&'a Url>) -> Self {
        Self {
            output: String::new(),
            base,
            hidden: None,
            lists: Vec::new(),
            quote_depth: 0,
            last_quote_depth: 0,
            pre_depth: 0,
            link: None,
            pending_newlines: 0,
            needs_space: false,
            line_prefix: String::new(),
            row_cells: None,
            has_rows: false,
        }
    }

    fn start_tag(&mut self, tag: &StartTag<()>) {
        let name = lossy_text(&tag.name);
        let name = name.as_ref();
        if let Some((hidden, depth)) = &mut self.hidden {
            *depth += usize::from(hidden == name && !tag.self_closing);
            return;
        }
        match name {
            "script" | "style" | "noscript" | "template" | "svg" | "iframe" | "object"
            | "canvas" | "audio" | "video" | "select" | "textarea"
                if !tag.self_closing =>
            {
                self.hidden = Some((name.to_owned(), 1));
            }
            "h1" | "h2" | "h3" | "h4" | "h5" | "h6" => {
                self.require_newlines(2);
                let level = usize::from(name.as_bytes()[1] - b'0');
                self.line_prefix = format!("{} ", "#".repeat(level));
            }
            "ul" => self.start_list(None),
            "ol" => {
                let first = attribute(tag, b"start").and_then(|it| it.parse().ok());
                self.start_list(Some(first.unwrap_or(1)));
            }
            "li" => self.start_item(),
            "blockquote" => {
                self.require_newlines(2);
                self.quote_depth += 1;
            }
            "pre" => {
                self.require_newlines(2);
                self.pre_depth += 1;
                if self.pre_depth == 1 {
                    self.push_standalone("```");
                    self.pending_newlines = 1;
                }
            }
            "code" | "kbd" | "samp" if self.pre_depth == 0 => self.push_opening("`"),
            "strong" | "b" if self.pre_depth == 0 => self.push_opening("**"),
            "em" | "i" if self.pre_depth == 0 => self.push_opening("*"),
            "a" if self.pre_depth == 0 => self.start_link(tag),
            "img" => self.push_image(tag),
            "br" => match self.pre_depth {
                0 => self.pending_newlines = self.pending_newlines.max(1),
                _ => self.push_text("\n"),
            },
            "hr" => {
                self.require_newlines(2);
                self.push_standalone("---");
                self.require_newlines(2);
            }
            "table" => {
                self.require_newlines(2);
                self.has_rows = false;
            }
            "tr" => {
                self.end_row();
                self.require_newlines(1);
                self.row_cells = Some(0);
            }
            "td" | "th" => self.start_cell(),
            _ => self.require_newlines(newlines_around(name)),
        }
    }

    /// `first` is the number of the first item; `None` for a list without numbers.
    fn start_list(&mut self, first: Option<u64>) {
        self.require_newlines(2);
        self.lists.push(first);
    }

    fn start_item(&mut self) {
        self.require_newlines(1);
        self.line_prefix = match self.lists.last_mut() {
            Some(Some(number)) => {
                let mark = format!("{number}. ");
                *number = number.saturating_add(1);
                mark
            }
            _ => "- ".to_owned(),
        };
    }

    fn start_link(&mut self, tag: &StartTag<()>) {
        self.end_link();
        if let Some(target) = attribute(tag, b"href").and_then(|it| self.resolve_url(&it)) {
            self.link = Some((target, self.output.len()));
            self.push_opening("[");
        }
    }

    /// Writes a picture, unless it has no text or no usable address.
    fn push_image(&mut self, tag: &StartTag<()>) {
        let alt = attribute(tag, b"alt").unwrap_or_default();
        let source = attribute(tag, b"src").and_then(|it| self.resolve_url(&it));
        if let (false, Some(source)) = (alt.trim().is_empty(), source) {
            self.push_opening("![");
            self.push_text(&alt);
            self.push_closing(&format!("]({source})"));
        }
    }

    fn start_cell(&mut self) {
        if let Some(cells) = self.row_cells {
            // A cell is one line: a line break in it becomes a space.
            self.push_standalone(if cells == 0 { "| " } else { " | " });
            self.row_cells = Some(cells + 1);
            self.needs_space = false;
        }
    }

    fn end_tag(&mut self, name: &str) {
        if let Some((hidden, depth)) = &mut self.hidden {
            if hidden == name {
                *depth -= 1;
                if *depth == 0 {
                    self.hidden = None;
                }
            }
            return;
        }
        match name {
            "h1" | "h2" | "h3" | "h4" | "h5" | "h6" => self.require_newlines(2),
            "ul" | "ol" => {
                self.lists.pop();
                self.require_newlines(2);
            }
            "li" => self.require_newlines(1),
            "blockquote" => {
                self.require_newlines(2);
                self.quote_depth = self.quote_depth.saturating_sub(1);
            }
            "pre" if self.pre_depth > 0 => {
                self.pre_depth -= 1;
                if self.pre_depth == 0 {
                    if !self.output.ends_with('\n') {
                        self.pending_newlines = 1;
                    }
                    self.push_standalone("```");
                    self.require_newlines(2);
                }
            }
            "code" | "kbd" | "samp" if self.pre_depth == 0 => self.push_closing("`"),
            "strong" | "b" if self.pre_depth == 0 => self.push_closing("**"),
            "em" | "i" if self.pre_depth == 0 => self.push_closing("*"),
            "a" => self.end_link(),
            "tr" => self.end_row(),
            "td" | "th" => {}
            "table" => {
                self.end_row();
                self.require_newlines(2);
            }
            _ => self.require_newlines(newlines_around(name)),
        }
    }

    fn push_text(&mut self, text: &str) {
        if self.hidden.is_some() {
            return;
        }
        if self.pre_depth > 0 {
            if !text.is_empty() {
                self.flush_pending();
                self.output.push_str(text);
            }
            return;
        }
        let mut words = text.split_ascii_whitespace().peekable();
        if words.peek().is_none() {
            self.needs_space |= !text.is_empty();
            return;
        }
        self.needs_space |= text.starts_with(|c: char| c.is_ascii_whitespace());
        for word in words {
            self.flush_pending();
            match self.row_cells {
                // A bar would end the cell.
                Some(_) => self.output.push_str(&word.replace('|', "\\|")),
                None => self.output.push_str(word),
            }
            self.needs_space = true;
        }
        self.needs_space = text.ends_with(|c: char| c.is_ascii_whitespace());
    }

    /// A mark that belongs to the text after it.
    fn push_opening(&mut self, mark: &str) {
        self.flush_pending();
        self.output.push_str(mark);
    }

    /// A mark that belongs to the text before it.
    fn push_closing(&mut self, mark: &str) {
        self.output.push_str(mark);
    }

    /// A mark without content.
    fn push_standalone(&mut self, mark: &str) {
        self.needs_space = false;
        self.flush_pending();
        self.output.push_str(mark);
    }

    /// Starts a new line, after at least this many line breaks.
    fn require_newlines(&mut self, lines: usize) {
        // The first paragraph of an item begins right after its mark.
        if lines == 0 || self.pre_depth > 0 || !self.line_prefix.is_empty() {
            return;
        }
        let lines = if self.lists.is_empty() { lines } else { 1 };
        match self.row_cells {
            Some(_) => self.needs_space = true,
            None => self.pending_newlines = self.pending_newlines.max(lines),
        }
    }

    /// Writes the line breaks, prefix or space that the next text needs.
    fn flush_pending(&mut self) {
        if self.pending_newlines > 0 || self.output.is_empty() {
            let newlines = if self.output.is_empty() {
                0
            } else {
                self.pending_newlines
            };
            let quote_prefix = "> ".repeat(self.quote_depth.min(MAX_INDENT_LEVELS));
            // The blank line between two blocks of the same quote belongs to the quote.
            let blank_line_prefix = "> ".repeat(
                self.quote_depth
                    .min(self.last_quote_depth)
                    .min(MAX_INDENT_LEVELS),
            );
            for index in 0..newlines {
                self.output.push('\n');
                if index + 1 < newlines {
                    self.output.push_str(blank_line_prefix.trim_end());
                }
            }
            self.last_quote_depth = self.quote_depth;
            self.output.push_str(&quote_prefix);
            let line_prefix = std::mem::take(&mut self.line_prefix);
            let list_depth = self.lists.len().min(MAX_INDENT_LEVELS);
            let levels = match line_prefix.is_empty() {
                true => list_depth,
                false => list_depth.saturating_sub(1),
            };
            self.output.push_str(&"  ".repeat(levels));
            self.output.push_str(&line_prefix);
            self.pending_newlines = 0;
        } else if self.needs_space && !self.output.ends_with(' ') {
            self.output.push(' ');
        }
        self.needs_space = false;
    }

    fn end_row(&mut self) {
        let Some(cells) = self.row_cells.take() else {
            return;
        };
        if cells == 0 {
            return;
        }
        self.output.push_str(" |");
        self.pending_newlines = 1;
        self.needs_space = false;
        if !self.has_rows {
            self.has_rows = true;
            self.push_standalone(&format!("|{}", " --- |".repeat(cells)));
            self.pending_newlines = 1;
        }
    }

    fn end_link(&mut self) {
        let Some((target, text_start)) = self.link.take() else {
            return;
        };
        // A link without text is invisible.
        match self
            .output
            .get(text_start..)
            .is_some_and(|it| it.ends_with('['))
        {
            true => {
                self.output.pop();
            }
            false => self.push_closing(&format!("]({target})")),
        }
    }

    /// The absolute URL; `None` if it cannot be followed, such as a script.
    fn resolve_url(&self, address: &str) -> Option<String> {
        let address = address.trim();
        if address.is_empty() || address.starts_with('#') || address.len() > MAX_URL_BYTES {
            return None;
        }
        let url = match self.base {
            Some(base) => base.join(address).ok()?,
            None => Url::parse(address).ok()?,
        };
        let has_linkable_scheme = matches!(url.scheme(), "http" | "https" | "mailto");
        let text = String::from(url);
        (has_linkable_scheme && text.len() <= MAX_URL_BYTES)
            .then(|| text.replace('(', "%28").replace(')', "%29"))
    }

    fn finish(mut self, max_bytes: usize) -> String {
        self.end_link();
        let trimmed_len = truncate_to_bytes(&self.output, max_bytes).trim_end().len();
        self.output.truncate(trimmed_len);
        self.output
    }
}

/// How many line breaks surround an element; 0 for an inline one.
fn newlines_around(name: &str) -> usize {
    match name {
        "p" | "dl" | "figure" | "section" | "article" | "main" | "header" | "footer" | "nav"
        | "aside" | "details" | "form" | "fieldset" | "title" | "address" | "hgroup" => 2,
        "div" | "dt" | "dd" | "figcaption" | "summary" | "caption" | "option" | "legend"
        | "center" | "body" => 1,
        _ => 0,
    }
}

fn attribute(tag: &StartTag<()>, name: &[u8]) -> Option<String> {
    let value = tag.attributes.get(name)?;
    Some(lossy_text(value).into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use url::Url;

    use super::to_markdown;

    fn markdown(html: &str) -> String {
        let base = Url::parse("https://example.com/docs/page").expect("a URL");
        let (text, is_cut) = to_markdown(html, Some(&base), 1 << 20);
        assert!(!is_cut);
        text
    }

    #[test]
    fn a_page_reads_as_markdown() {
        let html = r#"<!doctype html><html><head><title>The &amp; page</title><style>p { color: red }</style>
            <script>if (a < b) document.write("<p>no</p>")</script></head>
            <body><h1>One <em>and</em> two</h1><p>Some   <b>bold</b>, <i>lean</i> and <code>x = 1</code>.<br>Next
            line with <a href="../up?q=(1)">a link</a>, <a href="javascript:alert(1)">no link</a><a href="/x"></a>.
            <img src="a.png" alt="A picture"><img src="b.png"></p>
            <ul><li>first<li><p>second</p><ol start=3><li>deep</ol></ul>
            <blockquote><p>said</p><p>again</p></blockquote>
            <pre><code>let a = 1;
  let b = &lt;2&gt;;</code></pre><hr>
            <table><thead><tr><th>Name<th>Size</tr></thead><tr><td>a|b</td><td><p>1</p><p>2</p></td></tr></table>
            <div>last</div><svg><text>no</text></svg></body></html>"#;
        assert_eq!(
            markdown(html),
            "The & page\n\n# One *and* two\n\nSome **bold**, *lean* and `x = 1`.\nNext line with \
             [a link](https://example.com/up?q=%281%29), no link. ![A picture](https://example.com/docs/a.png)\n\n\
             - first\n- second\n  3. deep\n\n> said\n>\n> again\n\n```\nlet a = 1;\n  let b = <2>;\n```\n\n---\n\n\
             | Name | Size |\n| --- | --- |\n| a\\|b | 1 2 |\n\nlast"
        );
    }

    #[test]
    fn hostile_pages_take_linear_time() {
        let n = 100_000;
        for html in [
            "<div>".repeat(n),
            "<ul><li>x".repeat(n),
            "<blockquote>x<p>".repeat(n),
            "<b>x</b>".repeat(n),
            format!("{}{}", "<b a=1>".repeat(n), "<p>x".repeat(n)),
            "<table><tr><td>x".repeat(n),
            format!("<table><tr>{}{}", "<td>x".repeat(n), "<tr><td>y".repeat(n)),
            "<svg>".repeat(n),
            "</pre></ul></a></blockquote></tr></table>x".repeat(n / 10),
            "<a href=/x>".repeat(n),
            "<!--".repeat(n),
            format!("<p {}>", "a=1 ".repeat(n)),
            format!("<p {}>", "a=\"1\" ".repeat(n)),
            format!("<p {}>", "a='1' ".repeat(n)),
            format!("<p {}>", "a ".repeat(n)),
            format!("<p {}>", "a=\"1\"".repeat(n)),
            format!("</p {}>", "a=\"1\"/".repeat(n)),
            format!("<p {}", "a = \"&amp;\" ".repeat(n)),
            "&".repeat(n),
            "<pre>".repeat(n),
        ] {
            let (text, _) = to_markdown(&html, None, 1 << 20);
            assert!(text.len() <= 1 << 20, "{}", &html[..40]);
        }
    }

    #[test]
    fn a_tag_has_a_hundred_attributes_or_more() {
        let html = format!("<p {}>text</p>", "a=\"1\" ".repeat(100));
        assert_eq!(to_markdown(&html, None, 100), ("text".to_owned(), false));
        let html = format!("<p>before</p><p {}>after</p>", "a=\"1\" ".repeat(100_000));
        assert_eq!(to_markdown(&html, None, 100), ("before".to_owned(), true));
    }

    #[test]
    fn long_text_is_truncated_on_a_character_boundary() {
        let (text, is_cut) = to_markdown(&"é ".repeat(100), None, 100);
        assert!(is_cut && text.len() <= 100 && text.ends_with('é'), "{text}");
    }

    proptest! {
        #[test]
        fn any_input_is_accepted(html in "(<[a-z/ ]{0,6}>|<(ul|li|pre|a href=x|td|tr|table|b|h1|blockquote)>|</(ul|li|pre|a|td|tr|table)>|[a-zé &;<>\"\n]){0,60}") {
            to_markdown(&html, None, 200);
        }
    }
}

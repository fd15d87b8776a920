//! HTML made into Markdown, as a stream: token by token, without a tree, so that time and memory follow the input's
//! length whatever it nests or leaves open. Knows no network.

use std::borrow::Cow;

use html5gum::{DefaultEmitter, StartTag, StringReader, Token, Tokenizer};
use url::Url;

use crate::domain::message::beginning;

/// Lists and quotes below this level are not indented further: an indent costs its width on every line.
const MOST_LEVELS: usize = 8;
/// Most bytes of a link's address; a longer one is left out.
const MOST_ADDRESS: usize = 2048;

/// The page as Markdown, at most `most` bytes and a little; whether something was left out. Links are made whole by
/// `base`, the page's own address.
pub fn to_markdown(html: &str, base: Option<&Url>, most: usize) -> (String, bool) {
    let mut emitter = DefaultEmitter::default();
    // What stands in scripts and styles is no HTML.
    emitter.naively_switch_states(true);
    let tokens: Tokenizer<StringReader<'_>, DefaultEmitter> =
        Tokenizer::new_with_emitter(html, emitter);
    let mut page = Page::new(base);
    for token in tokens {
        let Ok(token) = token;
        match token {
            Token::StartTag(tag) => page.start(&tag),
            Token::EndTag(tag) => page.end(&text_of(&tag.name)),
            Token::String(text) => page.text(&text_of(&text)),
            Token::Comment(_) | Token::Doctype(_) | Token::Error(_) => {}
        }
        if page.out.len() > most {
            return (page.finish(most), true);
        }
    }
    (page.finish(most), false)
}

fn text_of(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// The page so far.
struct Page<'a> {
    out: String,
    base: Option<&'a Url>,
    /// The element whose content is left out, and how many of its name are open within it.
    hidden: Option<(String, usize)>,
    /// Of each open list, the next item's number; none where it has none.
    lists: Vec<Option<u64>>,
    quotes: usize,
    /// How many of them the last text stood in.
    quoted: usize,
    /// How deep in `pre`.
    verbatim: usize,
    /// The target of the open link, and where its text begins.
    link: Option<(String, usize)>,
    /// Line ends that the next text needs before it.
    wanted: usize,
    /// The next text needs a space before it.
    space: bool,
    /// What the next text's line begins with, such as an item's mark.
    lead: String,
    /// In a row of a table, how many of its cells have begun.
    row: Option<usize>,
    /// Whether a row of the open table has been told.
    has_rows: bool,
}

impl<'a> Page<'a> {
    fn new(base: Option<&'a Url>) -> Self {
        Self {
            out: String::new(),
            base,
            hidden: None,
            lists: Vec::new(),
            quotes: 0,
            quoted: 0,
            verbatim: 0,
            link: None,
            wanted: 0,
            space: false,
            lead: String::new(),
            row: None,
            has_rows: false,
        }
    }

    fn start(&mut self, tag: &StartTag<()>) {
        let name = text_of(&tag.name);
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
                self.block(2);
                let level = usize::from(name.as_bytes()[1] - b'0');
                self.lead = format!("{} ", "#".repeat(level));
            }
            "ul" | "ol" => {
                self.block(2);
                let number = (name == "ol").then(|| {
                    let first = attribute(tag, b"start").and_then(|it| it.parse().ok());
                    first.unwrap_or(1)
                });
                self.lists.push(number);
            }
            "li" => {
                self.block(1);
                self.lead = match self.lists.last_mut() {
                    Some(Some(number)) => {
                        let mark = format!("{number}. ");
                        *number = number.saturating_add(1);
                        mark
                    }
                    _ => "- ".to_owned(),
                };
            }
            "blockquote" => {
                self.block(2);
                self.quotes += 1;
            }
            "pre" => {
                self.block(2);
                self.verbatim += 1;
                if self.verbatim == 1 {
                    self.mark("```");
                    self.wanted = 1;
                }
            }
            "code" | "kbd" | "samp" if self.verbatim == 0 => self.open("`"),
            "strong" | "b" if self.verbatim == 0 => self.open("**"),
            "em" | "i" if self.verbatim == 0 => self.open("*"),
            "a" if self.verbatim == 0 => {
                self.end_link();
                if let Some(target) = attribute(tag, b"href").and_then(|it| self.whole(&it)) {
                    self.link = Some((target, self.out.len()));
                    self.open("[");
                }
            }
            "img" => {
                let about = attribute(tag, b"alt").unwrap_or_default();
                let source = attribute(tag, b"src").and_then(|it| self.whole(&it));
                if let (false, Some(source)) = (about.trim().is_empty(), source) {
                    self.open("![");
                    self.text(&about);
                    self.close(&format!("]({source})"));
                }
            }
            "br" => match self.verbatim {
                0 => self.wanted = self.wanted.max(1),
                _ => self.text("\n"),
            },
            "hr" => {
                self.block(2);
                self.mark("---");
                self.block(2);
            }
            "table" => {
                self.block(2);
                self.has_rows = false;
            }
            "tr" => {
                self.end_row();
                self.block(1);
                self.row = Some(0);
            }
            "td" | "th" => {
                if let Some(cells) = self.row {
                    // A cell is one line: what would end it becomes a space.
                    self.mark(if cells == 0 { "| " } else { " | " });
                    self.row = Some(cells + 1);
                    self.space = false;
                }
            }
            _ => self.block(gap(name)),
        }
    }

    fn end(&mut self, name: &str) {
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
            "h1" | "h2" | "h3" | "h4" | "h5" | "h6" => self.block(2),
            "ul" | "ol" => {
                self.lists.pop();
                self.block(2);
            }
            "li" => self.block(1),
            "blockquote" => {
                self.block(2);
                self.quotes = self.quotes.saturating_sub(1);
            }
            "pre" if self.verbatim > 0 => {
                self.verbatim -= 1;
                if self.verbatim == 0 {
                    if !self.out.ends_with('\n') {
                        self.wanted = 1;
                    }
                    self.mark("```");
                    self.block(2);
                }
            }
            "code" | "kbd" | "samp" if self.verbatim == 0 => self.close("`"),
            "strong" | "b" if self.verbatim == 0 => self.close("**"),
            "em" | "i" if self.verbatim == 0 => self.close("*"),
            "a" => self.end_link(),
            "tr" => self.end_row(),
            "td" | "th" => {}
            "table" => {
                self.end_row();
                self.block(2);
            }
            _ => self.block(gap(name)),
        }
    }

    fn text(&mut self, text: &str) {
        if self.hidden.is_some() {
            return;
        }
        if self.verbatim > 0 {
            if !text.is_empty() {
                self.begin();
                self.out.push_str(text);
            }
            return;
        }
        let mut words = text.split_ascii_whitespace().peekable();
        if words.peek().is_none() {
            self.space |= !text.is_empty();
            return;
        }
        self.space |= text.starts_with(|c: char| c.is_ascii_whitespace());
        for word in words {
            self.begin();
            match self.row {
                // It would end the cell.
                Some(_) => self.out.push_str(&word.replace('|', "\\|")),
                None => self.out.push_str(word),
            }
            self.space = true;
        }
        self.space = text.ends_with(|c: char| c.is_ascii_whitespace());
    }

    /// A mark that belongs to what follows.
    fn open(&mut self, mark: &str) {
        self.begin();
        self.out.push_str(mark);
    }

    /// A mark that belongs to what stands before it.
    fn close(&mut self, mark: &str) {
        self.out.push_str(mark);
    }

    /// A mark that stands by itself.
    fn mark(&mut self, mark: &str) {
        self.space = false;
        self.begin();
        self.out.push_str(mark);
    }

    /// What follows stands in a line of its own, after so many line ends.
    fn block(&mut self, lines: usize) {
        // Right behind its mark an item's own paragraph begins.
        if lines == 0 || self.verbatim > 0 || !self.lead.is_empty() {
            return;
        }
        let lines = if self.lists.is_empty() { lines } else { 1 };
        match self.row {
            Some(_) => self.space = true,
            None => self.wanted = self.wanted.max(lines),
        }
    }

    /// Puts what the next text needs before it.
    fn begin(&mut self) {
        if self.wanted > 0 || self.out.is_empty() {
            let ends = if self.out.is_empty() { 0 } else { self.wanted };
            let quotes = "> ".repeat(self.quotes.min(MOST_LEVELS));
            // The line between two blocks of one quote belongs to it.
            let between = "> ".repeat(self.quotes.min(self.quoted).min(MOST_LEVELS));
            for at in 0..ends {
                self.out.push('\n');
                if at + 1 < ends {
                    self.out.push_str(between.trim_end());
                }
            }
            self.quoted = self.quotes;
            self.out.push_str(&quotes);
            let lead = std::mem::take(&mut self.lead);
            let within = self.lists.len().min(MOST_LEVELS);
            let levels = match lead.is_empty() {
                true => within,
                false => within.saturating_sub(1),
            };
            self.out.push_str(&"  ".repeat(levels));
            self.out.push_str(&lead);
            self.wanted = 0;
        } else if self.space && !self.out.ends_with(' ') {
            self.out.push(' ');
        }
        self.space = false;
    }

    fn end_row(&mut self) {
        let Some(cells) = self.row.take() else { return };
        if cells == 0 {
            return;
        }
        self.out.push_str(" |");
        self.wanted = 1;
        self.space = false;
        if !self.has_rows {
            self.has_rows = true;
            self.mark(&format!("|{}", " --- |".repeat(cells)));
            self.wanted = 1;
        }
    }

    fn end_link(&mut self) {
        let Some((target, from)) = self.link.take() else {
            return;
        };
        // Nothing but the mark: a link that nobody sees.
        match self.out.get(from..).is_some_and(|it| it.ends_with('[')) {
            true => {
                self.out.pop();
            }
            false => self.close(&format!("]({target})")),
        }
    }

    /// An address made whole; none for what leads nowhere, such as a script.
    fn whole(&self, address: &str) -> Option<String> {
        let address = address.trim();
        if address.is_empty() || address.starts_with('#') || address.len() > MOST_ADDRESS {
            return None;
        }
        let url = match self.base {
            Some(base) => base.join(address).ok()?,
            None => Url::parse(address).ok()?,
        };
        let leads_somewhere = matches!(url.scheme(), "http" | "https" | "mailto");
        let text = String::from(url);
        (leads_somewhere && text.len() <= MOST_ADDRESS)
            .then(|| text.replace('(', "%28").replace(')', "%29"))
    }

    fn finish(mut self, most: usize) -> String {
        self.end_link();
        let kept = beginning(&self.out, most).trim_end().len();
        self.out.truncate(kept);
        self.out
    }
}

/// How many line ends part an element from what is around it; none for one within a line.
fn gap(name: &str) -> usize {
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
    Some(text_of(value).into_owned())
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
    fn what_is_hostile_costs_no_more_than_its_length() {
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
            "&".repeat(n),
            "<pre>".repeat(n),
        ] {
            let (text, _) = to_markdown(&html, None, 1 << 20);
            assert!(text.len() <= 1 << 20, "{}", &html[..40]);
        }
    }

    #[test]
    fn what_is_too_long_is_cut_on_a_character() {
        let (text, is_cut) = to_markdown(&"é ".repeat(100), None, 100);
        assert!(is_cut && text.len() <= 100 && text.ends_with('é'), "{text}");
    }

    proptest! {
        #[test]
        fn anything_can_be_read(html in "(<[a-z/ ]{0,6}>|<(ul|li|pre|a href=x|td|tr|table|b|h1|blockquote)>|</(ul|li|pre|a|td|tr|table)>|[a-zé &;<>\"\n]){0,60}") {
            to_markdown(&html, None, 200);
        }
    }
}

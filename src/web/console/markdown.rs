//! Markdown of models as HTML. It has no HTML of its own, loads no pictures, and links only to addresses of the web; headings are
//! paragraphs, since a page has its own.

use std::time::{Duration, Instant};

use maud::{Markup, PreEscaped, html};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::web::console::format;

/// Elements within each other; the marks of deeper ones are left out.
const MAX_DEPTH: usize = 24;
/// What is not rendered in this time is shown as it was written.
const MAX_TIME: Duration = Duration::from_millis(100);

/// Renders a text. Call it off the runtime's threads for a long one.
pub fn render(text: &str) -> Markup {
    let options =
        Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS;
    let mut writer = Writer::default();
    let deadline = Instant::now() + MAX_TIME;
    for (event, range) in Parser::new_ext(text, options).into_offset_iter() {
        if Instant::now() > deadline {
            writer.close_all();
            let rest = text.get(range.start..).unwrap_or_default();
            return html! { div.markdown { (PreEscaped(writer.html)) pre { (format::prose(rest)) } } };
        }
        writer.add(event);
    }
    writer.close_all();
    html! { div.markdown { (PreEscaped(writer.html)) } }
}

#[derive(Default)]
struct Writer {
    html: String,
    /// The ends of the open elements; empty for one that has none.
    open: Vec<&'static str>,
    is_in_table_head: bool,
}

impl Writer {
    fn add(&mut self, event: Event<'_>) {
        match event {
            Event::Start(tag) => self.start(&tag),
            Event::End(tag) => self.end(tag),
            Event::Text(text)
            | Event::Html(text)
            | Event::InlineHtml(text)
            | Event::InlineMath(text)
            | Event::DisplayMath(text)
            | Event::FootnoteReference(text) => self.text(&text),
            Event::Code(text) => {
                self.html.push_str("<code>");
                self.text(&text);
                self.html.push_str("</code>");
            }
            Event::SoftBreak => self.html.push('\n'),
            Event::HardBreak => self.html.push_str("<br>"),
            Event::Rule => self.html.push_str("<hr>"),
            Event::TaskListMarker(is_done) => {
                self.html.push_str(if is_done { "☑ " } else { "☐ " });
            }
        }
    }

    fn text(&mut self, text: &str) {
        let text = format::prose(text);
        self.html.push_str(&html! { (text) }.into_string());
    }

    fn start(&mut self, tag: &Tag<'_>) {
        let (start, end) = match tag {
            Tag::Paragraph | Tag::HtmlBlock => ("<p>", "</p>"),
            Tag::Heading { .. } => ("<p class=\"heading\">", "</p>"),
            Tag::BlockQuote(_) => ("<blockquote>", "</blockquote>"),
            Tag::CodeBlock(_) => ("<pre tabindex=\"0\">", "</pre>"),
            Tag::List(None) => ("<ul>", "</ul>"),
            Tag::List(Some(_)) => ("<ol>", "</ol>"),
            Tag::Item => ("<li>", "</li>"),
            Tag::Table(_) => ("<table class=\"list\">", "</tbody></table>"),
            Tag::TableHead => ("<thead><tr>", "</tr></thead><tbody>"),
            Tag::TableRow => ("<tr>", "</tr>"),
            Tag::TableCell if self.is_in_table_head => ("<th>", "</th>"),
            Tag::TableCell => ("<td>", "</td>"),
            Tag::Emphasis => ("<em>", "</em>"),
            Tag::Strong => ("<strong>", "</strong>"),
            Tag::Strikethrough => ("<del>", "</del>"),
            Tag::Link { dest_url, .. } if is_web_address(dest_url) => ("", "</a>"),
            Tag::Image { .. } => ("<span class=\"muted\">[picture: ", "]</span>"),
            _ => ("", ""),
        };
        if self.open.len() >= MAX_DEPTH {
            self.open.push("");
            return;
        }
        self.is_in_table_head |= matches!(tag, Tag::TableHead);
        match tag {
            Tag::Link { dest_url, .. } if end == "</a>" => {
                let link = html! { a href=(dest_url) rel="noopener noreferrer nofollow" target="_blank" {} };
                let link = link.into_string();
                self.html.push_str(link.trim_end_matches("</a>"));
            }
            _ => self.html.push_str(start),
        }
        self.open.push(end);
    }

    fn end(&mut self, tag: TagEnd) {
        self.is_in_table_head &= tag != TagEnd::TableHead;
        self.html.push_str(self.open.pop().unwrap_or_default());
    }

    fn close_all(&mut self) {
        while let Some(end) = self.open.pop() {
            self.html.push_str(end);
        }
    }
}

fn is_web_address(address: &str) -> bool {
    let address = address.to_ascii_lowercase();
    ["https://", "http://", "mailto:"]
        .iter()
        .any(|start| address.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::render;

    fn html(text: &str) -> String {
        render(text).into_string()
    }

    #[test]
    fn markdown_becomes_elements() {
        let text = "# Title\n\nA *b* **c** `d < e`\n\n- one\n- [x] two\n\n```rust\nfn f() {}\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n";
        let html = html(text);
        for part in [
            "<p class=\"heading\">Title</p>",
            "<em>b</em>",
            "<strong>c</strong>",
            "<code>d &lt; e</code>",
            "<li>one</li>",
            "☑ two",
            "fn f() {}",
            "<th>a</th>",
            "<td>2</td>",
        ] {
            assert!(html.contains(part), "{part} is missing in {html}");
        }
    }

    #[test]
    fn hostile_text_has_no_html_no_pictures_and_no_other_links() {
        let text = "See <script>x</script> <img src=x onerror=y> ![p](https://e.com/p.png) [a](javascript:x) \
                    [b](https://e.com/?\"q=<) [c](data:text/html,x)\n\n<div onclick=z>\n";
        let html = html(text);
        for part in ["<script", "<img", "<div on", "javascript:x\"", "data:text"] {
            assert!(!html.contains(part), "{part} is in {html}");
        }
        assert!(
            html.contains("href=\"https://e.com/?&quot;q=&lt;\""),
            "{html}"
        );
        assert!(html.contains("[picture: p]"), "{html}");
    }

    #[test]
    fn depth_is_bounded_and_long_texts_are_whole() {
        let deep = format!("{}x", "> ".repeat(10_000));
        assert!(html(&deep).matches("<blockquote>").count() <= super::MAX_DEPTH);
        let long = "word *em* and `code` ".repeat(5_000);
        let html = html(&long);
        assert!(html.matches("word").count() == 5_000);
    }
}

//! Serializes an agent's settings for the API and `axed agents show`: the keys of its file, with defaults filled in.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::settings::{Presence, Section, Setting, Visitor};
use crate::domain::http_tool::HttpToolView;
use crate::domain::mcp::McpServerView;
use crate::ssrf;

/// The audience of the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Clients of the API: omits possible secrets.
    Client,
    /// The operator: a valid agent file. Possible secrets of MCP servers are masked.
    Operator,
}

/// A section to serialize. Durations are in seconds or, if the key says so, in milliseconds; 0 means none.
pub struct SectionView<'a, S> {
    pub section: &'a S,
    pub audience: Audience,
    /// Whether to include the key `enabled`.
    pub has_enabled: bool,
    /// Keys to omit.
    pub omitted: &'static [&'static str],
}

impl<'a, S: Section> SectionView<'a, S> {
    pub fn new(section: &'a S, audience: Audience) -> Self {
        Self {
            section,
            audience,
            has_enabled: false,
            omitted: &[],
        }
    }
}

impl<S: Section> Serialize for SectionView<'_, S> {
    fn serialize<Z: Serializer>(&self, serializer: Z) -> Result<Z::Ok, Z::Error> {
        let mut writer = Writer {
            map: serializer.serialize_map(None)?,
            audience: self.audience,
            omits_unset: S::OMITS_UNSET,
            omitted: self.omitted,
            result: Ok(()),
        };
        if self.has_enabled {
            writer.write("enabled", &true);
        }
        // Visitors may change settings, so this one visits a copy.
        self.section.clone().visit(&mut writer);
        writer.result?;
        writer.map.end()
    }
}

struct Writer<M: SerializeMap> {
    map: M,
    audience: Audience,
    omits_unset: bool,
    omitted: &'static [&'static str],
    result: Result<(), M::Error>,
}

impl<M: SerializeMap> Writer<M> {
    fn write(&mut self, key: &'static str, value: &(impl Serialize + ?Sized)) {
        if self.result.is_ok() && !self.omitted.contains(&key) {
            self.result = self.map.serialize_entry(key, value);
        }
    }

    fn write_optional(&mut self, key: &'static str, value: Option<impl Serialize>) {
        if value.is_some() || !self.omits_unset {
            self.write(key, &value);
        }
    }

    fn write_unless_empty(&mut self, key: &'static str, is_empty: bool, value: &impl Serialize) {
        if !is_empty || !self.omits_unset {
            self.write(key, value);
        }
    }
}

impl<M: SerializeMap> Visitor for Writer<M> {
    fn setting(&mut self, key: &'static str, setting: Setting<'_>) {
        match setting {
            Setting::Text(text) => self.write(key, text),
            Setting::OptionalText(text) | Setting::VariableName(text) => {
                self.write_optional(key, text.as_deref());
            }
            Setting::Path(path) => self.write_optional(key, path.as_deref()),
            Setting::Flag(flag) => self.write(key, flag),
            Setting::Texts(_, texts) => self.write_unless_empty(key, texts.is_empty(), texts),
            Setting::Model(model) => self.write(key, model),
            Setting::OptionalModel(model) => self.write_optional(key, model.as_ref()),
            Setting::Models(models) => self.write(key, models),
            Setting::Choice(choice) => self.write_optional(key, choice.name()),
            Setting::Whole(_, number) => match number.get() {
                None if self.omits_unset => {}
                number => self.write(key, &number.unwrap_or(0)),
            },
            Setting::Number(_, number) => self.write(key, number),
            Setting::OptionalNumber(_, number) => self.write_optional(key, *number),
            Setting::Usd(_, cost) => self.write(key, &cost.map_or(0.0, |cost| cost.to_usd())),
            Setting::Seconds(time) => self.write(key, &time.map_or(0, |time| time.as_secs())),
            Setting::Milliseconds(time) => {
                let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
                self.write(key, &milliseconds);
            }
            Setting::Url(url) => match self.audience {
                Audience::Client => self.write(key, &ssrf::redact_query(url)),
                Audience::Operator => self.write(key, url),
            },
            Setting::ResponseFormat(ResponseFormat::Text) if self.audience == Audience::Client => {}
            Setting::ResponseFormat(format) => self.write(key, format),
            Setting::Schema(schema) => self.write_optional(key, schema.as_ref()),
            Setting::Template(template) => self.write_optional(key, template.as_ref()),
            Setting::Extra(extra) => self.write_unless_empty(key, extra.is_empty(), extra),
            Setting::Schedules(schedules) => self.write(key, schedules),
            Setting::Triggers(triggers) => self.write(key, triggers),
            Setting::HttpTools(tools) => {
                let view = match self.audience {
                    Audience::Client => HttpToolView::for_client,
                    Audience::Operator => HttpToolView::for_operator,
                };
                let tools: Vec<HttpToolView<'_>> = tools.iter().map(view).collect();
                self.write(key, &tools);
            }
            Setting::McpServers(servers) => {
                let servers: Vec<McpServerView<'_>> = servers
                    .iter()
                    .map(|server| match self.audience {
                        Audience::Client => McpServerView::for_client(server),
                        Audience::Operator => McpServerView::for_operator(server),
                    })
                    .collect();
                self.write(key, &servers);
            }
        }
    }

    fn section<S: Section>(&mut self, key: &'static str, section: &mut S) {
        self.write(key, &SectionView::new(section, self.audience));
    }

    fn optional_section<S: Section>(
        &mut self,
        key: &'static str,
        presence: Presence,
        section: &mut Option<S>,
    ) {
        if let Some(section) = section {
            let view = SectionView {
                has_enabled: matches!(presence, Presence::Enabled),
                ..SectionView::new(section, self.audience)
            };
            self.write(key, &view);
        }
    }
}

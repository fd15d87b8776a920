//! Declares the settings of a table, each of them once: its key, type, default, kind and description. From the declaration come the
//! struct, its defaults, the reader, the views, the JSON Schema and the templates.

use std::marker::PhantomData;

use schemars::SchemaGenerator;
use serde_json::{Map, Value as Json};

use crate::settings::table_reader::TableReader;

/// A table of settings. Its default holds the defaults of the settings.
pub trait Section: Clone + Default {
    /// The name of its schema in the OpenAPI document.
    const SCHEMA: &'static str = "";
    /// The lines of its description.
    const ABOUT: &'static [&'static str];
    /// Whether views omit the settings that are unset. Other sections show them as 0 or null.
    const OMITS_UNSET: bool = false;

    /// Reads the settings that the table has. The others keep their values.
    fn read(&mut self, table: &mut TableReader<'_>);

    /// Passes every setting to the visitor, in the order of the declaration.
    fn visit<V: Visitor>(&self, visitor: &mut V);
}

/// What the declaration says about a setting besides its kind.
pub struct Setting {
    pub key: &'static str,
    /// The lines of its description.
    pub about: &'static [&'static str],
    /// A value in TOML for templates, if the default would explain less.
    pub example: Option<&'static str>,
}

/// Shows or describes settings.
pub trait Visitor {
    fn setting<T, K: Kind<T>>(&mut self, setting: &Setting, kind: &K, value: &T);
}

/// How a setting of the type `T` is read, shown and described.
pub trait Kind<T> {
    /// Whether the setting is a key of this table; `false` if the field is filled by other means.
    const IS_KEY: bool = true;
    /// Whether views omit it if it is null.
    const OMITS_NULL: bool = false;

    /// Reads the key. If it is absent or wrong, the value stays.
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut T);

    /// As in a file; null if it is unset.
    fn show(&self, value: &T, audience: Audience) -> Json;

    fn schema(&self, generator: &mut SchemaGenerator) -> Json;

    /// Visits the settings of the section that it is, with their defaults. Returns whether it is one.
    fn visit_section<V: Visitor>(&self, _visitor: &mut V) -> bool {
        false
    }
}

/// The audience of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Clients of the API: omits possible secrets.
    Client,
    /// The operator: a valid file. Possible secrets of MCP servers are masked.
    Operator,
}

/// Declares a section. After the description of a setting: its field, its key in parentheses if that has another name, its type,
/// its default unless that is the type's, and its kind.
macro_rules! section {
    (@default) => { Default::default() };
    (@default $default:expr) => { $default };
    (@key $field:ident) => { stringify!($field) };
    (@key $field:ident $key:literal) => { $key };
    (@example) => { None };
    (@example $example:literal) => { Some($example) };
    (
        $(#[doc = $about:tt])+
        #[derive($($derived:tt)*)]
        $(#[$attribute:meta])*
        pub struct $name:ident $(in $schema:literal)? $(, omits_unset = $omits_unset:literal)? {
            $(
                $(#[doc = $doc:tt])*
                $(#[serde($($serde:tt)*)])?
                pub $field:ident $(($key:literal))?: $type:ty $(= $default:expr)?, $kind:expr $(, example = $example:literal)?;
            )*
        }
        $(also in $outer:ident {
            $($(#[doc = $inner_doc:tt])* $inner:ident: $inner_kind:expr $(, example = $inner_example:literal)?;)*
        })?
    ) => {
        $(#[doc = $about])+
        #[derive($($derived)*)]
        $(#[$attribute])*
        pub struct $name {
            $($(#[doc = $doc])* $(#[serde($($serde)*)])? pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $crate::settings::section::section!(@default $($default)?),)* }
            }
        }

        impl $crate::settings::section::Section for $name {
            $(const SCHEMA: &'static str = $schema;)?
            const ABOUT: &'static [&'static str] = &[$($about),+];
            $(const OMITS_UNSET: bool = $omits_unset;)?

            fn read(&mut self, table: &mut $crate::settings::table_reader::TableReader<'_>) {
                use $crate::settings::section::{Kind, section};
                $(Kind::read(&$kind, table, section!(@key $field $($key)?), &mut self.$field);)*
                $($(Kind::read(&$inner_kind, table, stringify!($inner), &mut self.$outer.$inner);)*)?
            }

            fn visit<V: $crate::settings::section::Visitor>(&self, visitor: &mut V) {
                use $crate::settings::section::{Setting, section, visit_setting};
                $({
                    let setting = Setting {
                        key: section!(@key $field $($key)?),
                        about: &[$($doc),*],
                        example: section!(@example $($example)?),
                    };
                    visit_setting(visitor, &setting, &$kind, &self.$field);
                })*
                $($({
                    let setting = Setting {
                        key: stringify!($inner),
                        about: &[$($inner_doc),*],
                        example: section!(@example $($inner_example)?),
                    };
                    visit_setting(visitor, &setting, &$inner_kind, &self.$outer.$inner);
                })*)?
            }
        }
    };
}
pub(crate) use section;

/// For `section!`.
pub fn visit_setting<V: Visitor, T, K: Kind<T>>(
    visitor: &mut V,
    setting: &Setting,
    kind: &K,
    value: &T,
) {
    if K::IS_KEY {
        visitor.setting(setting, kind, value);
    }
}

/// The settings of a section that are in this table.
pub fn read_section<S: Section>(table: &mut TableReader<'_>) -> S {
    let mut section = S::default();
    section.read(table);
    section
}

/// The settings of a section as in a file, with the defaults filled in.
pub fn show_section<S: Section>(section: &S, audience: Audience) -> Map<String, Json> {
    let mut view = View {
        settings: Map::new(),
        audience,
        section: PhantomData::<S>,
    };
    section.visit(&mut view);
    view.settings
}

struct View<S> {
    settings: Map<String, Json>,
    audience: Audience,
    section: PhantomData<S>,
}

impl<S: Section> Visitor for View<S> {
    fn setting<T, K: Kind<T>>(&mut self, setting: &Setting, kind: &K, value: &T) {
        let shown = kind.show(value, self.audience);
        let is_unset = match &shown {
            Json::Null => K::OMITS_NULL || S::OMITS_UNSET,
            Json::Array(items) => S::OMITS_UNSET && items.is_empty(),
            Json::Object(entries) => S::OMITS_UNSET && entries.is_empty(),
            _ => false,
        };
        if !is_unset {
            self.settings.insert(setting.key.to_owned(), shown);
        }
    }
}

/// A description as one text.
pub fn join_lines(lines: &[&str]) -> String {
    let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
    lines.join(" ")
}

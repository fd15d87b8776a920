//! Enums whose values have names, each of them written once.

/// An enum whose values have names.
pub trait Choice: Copy + PartialEq + 'static {
    /// Every value with its name.
    const NAMES: &'static [(&'static str, Self)];

    fn name(self) -> &'static str {
        let mut names = Self::NAMES.iter();
        names.find(|it| it.1 == self).map_or("", |it| it.0)
    }

    fn named(name: &str) -> Option<Self> {
        let found = Self::NAMES.iter().find(|it| it.0 == name);
        found.map(|it| it.1)
    }

    /// Every name: `a, b`.
    fn list_names() -> String {
        let names: Vec<&str> = Self::NAMES.iter().map(|it| it.0).collect();
        names.join(", ")
    }
}

/// Declares an enum with the name of each value in files and in JSON.
macro_rules! choice {
    (
        $(#[$attribute:meta])*
        pub enum $name:ident {
            $($(#[$value_attribute:meta])* $value:ident = $text:tt,)+
        }
    ) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        $(#[$attribute])*
        pub enum $name {
            $($(#[$value_attribute])* #[serde(rename = $text)] $value,)+
        }

        impl $crate::settings::choice::Choice for $name {
            const NAMES: &'static [(&'static str, Self)] = &[$(($text, Self::$value)),+];
        }

        impl $name {
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }
        }
    };
}
pub(crate) use choice;

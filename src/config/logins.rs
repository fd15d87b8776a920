//! Reads `[logins]`.

use std::path::Path;

use crate::config::Logins;
use crate::settings::kinds::check_variable_name;
use crate::settings::table_reader::TableReader;

pub(in crate::config) fn read(s: &mut TableReader<'_>, data_dir: &Path) -> Logins {
    let key_env = s.parsed_text("key_env", check_variable_name);
    Logins {
        dir: data_dir.join("logins"),
        key_env: key_env.unwrap_or_else(|| "AXED_LOGIN_KEY".to_owned()),
    }
}

//! `axed keys`: creates keys for clients. axed stores no key: the user keeps the key, and the configuration holds its
//! hash.

use std::convert::Infallible;
use std::process::ExitCode;

use anyhow::Context;
use secrecy::SecretString;
use serde_json::json;

use crate::cli::client::{Client, ClientError};
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::config::environment::is_valid_name;
use crate::config::key_hash::KeyHash;
use crate::config::secrets;

/// Prefix of every key, so that people and secret scanners recognise a leaked one.
const PREFIX: &str = "axed_";

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Print a new key and the configuration for it
    New(New),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  axed keys new mobile-app")]
pub struct New {
    /// Name of the key, which owns the runs that the key starts
    #[arg(default_value = "client")]
    name: String,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub struct ClientKey {
    /// Key for the daemon; visible to other users, prefer AXED_KEY or
    /// AXED_KEY_FILE
    #[arg(long, value_name = "KEY", value_parser = parse_secret)]
    key: Option<SecretString>,
}

impl ClientKey {
    pub fn client(&self, server: &str) -> Result<Client, ClientError> {
        let client = Client::new(server)?;
        let key = match &self.key {
            Some(key) => Some(key.clone()),
            None => secrets::client_key()?,
        };
        match key {
            Some(key) => client.with_key(&key),
            None => Ok(client),
        }
    }

    /// Whether the flag is set.
    pub fn is_given(&self) -> bool {
        self.key.is_some()
    }
}

/// Never fails, because clap's error would show the value.
fn parse_secret(text: &str) -> Result<SecretString, Infallible> {
    Ok(SecretString::from(text))
}

pub fn keys(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::New(New { name, format }) => print_new_key(&name, format)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn print_new_key(name: &str, format: FormatArgs) -> anyhow::Result<()> {
    if !is_valid_name(name) {
        let reason =
            "is not a valid key name: up to 64 letters, digits, - _ . without two _ in a row";
        return Err(InvalidInput(format!("{name:?} {reason}")).into());
    }
    let mut random = [0; 32];
    getrandom::fill(&mut random).context("the system has no random numbers for a key")?;
    let mut key = String::from(PREFIX);
    for byte in random {
        key.push_str(&format!("{byte:02x}"));
    }
    let sha256 = KeyHash::digest(key.as_bytes());
    if format.is_json() {
        return output::print_json(
            &json!({"name": name, "key": key, "sha256": sha256.to_string()}),
        );
    }
    output::print_line(format_args!(
        "{key}\n\n\
         # This is the key; it is shown only once. Add these lines to the server's configuration:\n\
         [auth.keys.\"{name}\"]\n\
         sha256 = \"{sha256}\"\n\
         scopes = [\"run\", \"read\", \"cancel\"]"
    ))
}

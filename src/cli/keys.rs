//! `axed keys`: keys for clients. Nothing is stored here: the key goes to whoever asks, its digest into the configuration.

use std::convert::Infallible;
use std::process::ExitCode;

use anyhow::Context;
use secrecy::SecretString;

use crate::cli::client::{Client, ClientError};
use crate::cli::exit::InvalidInput;
use crate::cli::output;
use crate::config::environment::{self, is_valid_name};
use crate::config::key_hash::KeyHash;

/// What every key begins with, so that people and scanners know one that got lost.
const PREFIX: &str = "axed_";

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Print a new key, once, and the lines that make the configuration know it
    New(New),
}

#[derive(Debug, clap::Args)]
pub struct New {
    /// The key's name: it owns the runs that the key starts
    #[arg(default_value = "client")]
    name: String,
}

/// The key for a daemon that asks for one.
#[derive(Clone, Debug, clap::Args)]
pub struct ClientKey {
    /// The key that the daemon asks for; others on this machine can see it here, so better in AXED_KEY [default: AXED_KEY]
    #[arg(long, value_name = "KEY", requires = "server", value_parser = parse_secret)]
    key: Option<SecretString>,
}

impl ClientKey {
    /// A client of this daemon that sends the key.
    pub fn client(&self, server: &str) -> Result<Client, ClientError> {
        let client = Client::new(server)?;
        match self.key.clone().or_else(environment::client_key) {
            Some(key) => client.with_key(&key),
            None => Ok(client),
        }
    }
}

/// Never fails, because an error would show the value.
fn parse_secret(text: &str) -> Result<SecretString, Infallible> {
    Ok(SecretString::from(text))
}

/// Makes keys.
pub fn keys(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::New(New { name }) => print_new_key(&name)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn print_new_key(name: &str) -> anyhow::Result<()> {
    if !is_valid_name(name) {
        let reason = "is no key's name: up to 64 letters, digits, - _ . without two _ in a row";
        return Err(InvalidInput(format!("{name:?} {reason}")).into());
    }
    let mut random = [0; 32];
    getrandom::fill(&mut random).context("the system has no random numbers for a key")?;
    let mut key = String::from(PREFIX);
    for byte in random {
        key.push_str(&format!("{byte:02x}"));
    }
    output::print_line(format_args!(
        "{key}\n\n\
         # That is the key; it is shown this once. The server's configuration knows it by these lines:\n\
         [auth.keys.\"{name}\"]\n\
         sha256 = \"{}\"\n\
         scopes = [\"run\", \"read\", \"cancel\"]",
        KeyHash::digest(key.as_bytes())
    ))
}

//! Reads `[mcp_servers.oauth]` of an agent file.

use url::Url;

use crate::domain::mcp_oauth::{ClientAuth, McpOauth, OauthGrant};
use crate::settings::kinds::check_variable_name;
use crate::settings::table_reader::TableReader;
use crate::ssrf;

const MAX_CLIENT_ID: usize = 1024;
const MAX_SCOPES: usize = 64;

/// Returns the table `oauth`, if it is there and complete; problems are reported.
pub fn read(server: &mut TableReader<'_>) -> Option<McpOauth> {
    server.peek("oauth")?;
    server.nested("oauth", parse)
}

fn parse(s: &mut TableReader<'_>) -> Option<McpOauth> {
    let has_grant = s.peek("grant").is_some();
    let grant = s.one_of("grant", &OauthGrant::NAMES);
    if !has_grant {
        s.push_missing(
            "grant",
            "is required: \"client_credentials\" or \"device_code\"",
        );
    }
    let has_client_id = s.peek("client_id").is_some();
    let client_id = s.parsed_text("client_id", check_client_id);
    if !has_client_id {
        s.push_missing(
            "client_id",
            "is required: the id under which axed is registered with the authorization server",
        );
    }
    let has_secret = s.peek("client_secret_env").is_some();
    let client_secret_env = s.parsed_text("client_secret_env", check_variable_name);
    if !has_secret && grant == Some(OauthGrant::ClientCredentials) {
        s.push_missing(
            "client_secret_env",
            "is required where grant is client_credentials: the environment variable with the client's secret",
        );
    }
    let client_auth = s.one_of("client_auth", &ClientAuth::NAMES);
    let scopes = read_scopes(s);
    let issuer = s.parsed_text("issuer", check_issuer);
    let token_url = s.parsed_text("token_url", check_endpoint);
    let device_node = s.peek("device_authorization_url");
    let device_authorization_url = s.parsed_text("device_authorization_url", check_endpoint);
    let is_device = grant == Some(OauthGrant::DeviceCode);
    match device_node {
        Some(node) if !is_device || token_url.is_none() => {
            let why = "is only for grant = \"device_code\", beside token_url";
            s.push_invalid(&node, "device_authorization_url", why);
        }
        None if is_device && token_url.is_some() => s.push_missing(
            "device_authorization_url",
            "is required beside token_url: no metadata is read that would name it",
        ),
        _ => {}
    }
    Some(McpOauth {
        grant: grant?,
        client_id: client_id?,
        client_secret_env,
        client_auth,
        scopes,
        issuer,
        token_url,
        device_authorization_url,
    })
}

fn read_scopes(s: &mut TableReader<'_>) -> Vec<String> {
    let node = s.peek("scopes");
    let scopes = s.text_list("scopes").unwrap_or_default();
    // RFC 6749, section 3.3.
    let is_scope = |text: &String| {
        let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\\');
        !text.is_empty() && text.chars().all(is_plain)
    };
    if let Some(node) = &node {
        if let Some(wrong) = scopes.iter().find(|scope| !is_scope(scope)) {
            let why = format!("has {wrong:?}, which is no scope: write one scope an item");
            s.push_invalid(node, "scopes", &why);
        }
        if scopes.len() > MAX_SCOPES {
            let why = format!("cannot have more than {MAX_SCOPES} scopes");
            s.push_invalid(node, "scopes", &why);
        }
    }
    scopes
}

fn check_client_id(text: &str) -> Result<String, String> {
    // RFC 6749, appendix A.1.
    let is_plain = (1..=MAX_CLIENT_ID).contains(&text.len())
        && text.chars().all(|c| c == ' ' || c.is_ascii_graphic());
    match is_plain {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "must be 1 to {MAX_CLIENT_ID} visible ASCII characters"
        )),
    }
}

/// Issuers are compared as texts, so the text is kept.
fn check_issuer(text: &str) -> Result<String, String> {
    let url = check_url(text)?;
    match url.query() {
        Some(_) => Err("must hold no query: an issuer has none".to_owned()),
        None => Ok(text.to_owned()),
    }
}

fn check_endpoint(text: &str) -> Result<String, String> {
    check_url(text).map(|_| text.to_owned())
}

fn check_url(text: &str) -> Result<Url, String> {
    if text.contains('#') {
        return Err("must hold no #".to_owned());
    }
    ssrf::parse_url(text).map_err(|why| why.to_string())
}

//! Finds the authorization server of an MCP server: protected resource metadata (RFC 9728), then authorization server
//! metadata (RFC 8414, OpenID Connect Discovery). Nothing is believed that the texts say must be rejected.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use url::Url;

use crate::domain::mcp_oauth::{ClientAuth, McpOauth};
use crate::domain::message::shorten;
use crate::tools::mcp::oauth::endpoint::{NamedHosts, OauthHttp};

/// Most items of a list in metadata that are read.
const MAX_ITEMS: usize = 64;
const MAX_SHOWN: usize = 200;

/// Where tokens for a server come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorizationServer {
    /// Its issuer; `None` if the file names the endpoints.
    pub issuer: Option<String>,
    pub token_endpoint: Url,
    /// Not checked yet, because not every grant needs it.
    pub device_authorization_endpoint: Option<String>,
    /// As well not checked yet.
    pub revocation_endpoint: Option<String>,
    /// The methods that the token endpoint accepts; `None` if it does not say.
    pub auth_methods: Option<Vec<String>>,
    /// The identifier of the MCP server (RFC 8707).
    pub resource: String,
    /// The scopes that the MCP server says it needs.
    pub resource_scopes: Vec<String>,
}

impl AuthorizationServer {
    /// How the client authenticates. RFC 8414: without a list, the method is `client_secret_basic`.
    pub fn client_auth(&self, settings: &McpOauth) -> ClientAuth {
        let has = |name: &str| {
            let methods = self.auth_methods.iter().flatten();
            methods.into_iter().any(|method| method == name)
        };
        match settings.client_auth {
            Some(method) => method,
            None if has("client_secret_post") && !has("client_secret_basic") => {
                ClientAuth::ClientSecretPost
            }
            None => ClientAuth::ClientSecretBasic,
        }
    }
}

/// The discovery for one MCP server.
pub struct Discovery<'a> {
    pub http: &'a OauthHttp,
    pub hosts: &'a NamedHosts,
    pub settings: &'a McpOauth,
    /// The server's URL without query and fragment.
    pub server_url: &'a Url,
}

#[derive(Deserialize)]
struct ResourceMetadata {
    resource: String,
    #[serde(default)]
    authorization_servers: Vec<String>,
    #[serde(default)]
    scopes_supported: Vec<String>,
}

#[derive(Deserialize)]
struct ServerMetadata {
    issuer: String,
    token_endpoint: Option<String>,
    device_authorization_endpoint: Option<String>,
    revocation_endpoint: Option<String>,
    token_endpoint_auth_methods_supported: Option<Vec<String>>,
}

impl Discovery<'_> {
    /// Finds the authorization server. `metadata_url` is from the server's challenge.
    ///
    /// # Errors
    /// There is none that may be used. The text is a sentence of its own.
    pub async fn find(&self, metadata_url: Option<&str>) -> Result<AuthorizationServer, String> {
        if let Some(server) = self.named_endpoints(canonical(self.server_url))? {
            return Ok(server);
        }
        let resource = self.resource_metadata(metadata_url).await?;
        let issuer = self.choose_issuer(resource.as_ref())?;
        let (resource, mut scopes) = match resource {
            Some(it) => (it.resource, it.scopes_supported),
            None => (canonical(self.server_url), Vec::new()),
        };
        scopes.truncate(MAX_ITEMS);
        Ok(AuthorizationServer {
            resource_scopes: scopes,
            ..self.of_issuer(issuer, resource).await?
        })
    }

    /// The server that issued a login for this resource. Nobody else gets its refresh token, whatever the MCP server's
    /// metadata say now.
    ///
    /// # Errors
    /// As [`Discovery::find`].
    pub async fn of_login(
        &self,
        issuer: Option<String>,
        resource: String,
    ) -> Result<AuthorizationServer, String> {
        match (issuer, self.named_endpoints(resource.clone())?) {
            (Some(issuer), None) => self.of_issuer(issuer, resource).await,
            (None, Some(server)) => Ok(server),
            _ => Err("the login is of another authorization server".to_owned()),
        }
    }

    /// The server whose endpoints the file names; `None` if it names none.
    fn named_endpoints(&self, resource: String) -> Result<Option<AuthorizationServer>, String> {
        let Some(token_url) = &self.settings.token_url else {
            return Ok(None);
        };
        Ok(Some(AuthorizationServer {
            issuer: None,
            token_endpoint: self.hosts.check(token_url)?,
            device_authorization_endpoint: self.settings.device_authorization_url.clone(),
            revocation_endpoint: None,
            auth_methods: None,
            resource,
            resource_scopes: Vec::new(),
        }))
    }

    async fn of_issuer(
        &self,
        issuer: String,
        resource: String,
    ) -> Result<AuthorizationServer, String> {
        let metadata = self.server_metadata(&issuer).await?;
        let token_endpoint = metadata.token_endpoint;
        let token_endpoint = token_endpoint
            .ok_or_else(|| format!("the metadata of {} has no token_endpoint", show(&issuer)))?;
        let token_endpoint = self.hosts.check(&token_endpoint);
        Ok(AuthorizationServer {
            token_endpoint: token_endpoint.map_err(|why| {
                let issuer = show(&issuer);
                format!("the token_endpoint of {issuer} is refused: {why}")
            })?,
            device_authorization_endpoint: metadata.device_authorization_endpoint,
            revocation_endpoint: metadata.revocation_endpoint,
            auth_methods: metadata.token_endpoint_auth_methods_supported,
            issuer: Some(issuer),
            resource,
            resource_scopes: Vec::new(),
        })
    }

    /// The server's own metadata; `None` if it has none.
    async fn resource_metadata(
        &self,
        metadata_url: Option<&str>,
    ) -> Result<Option<ResourceMetadata>, String> {
        if let Some(text) = metadata_url {
            let url = self.hosts.check(text);
            let url = url.map_err(|why| format!("its resource_metadata is refused: {why}"))?;
            return match self.document::<ResourceMetadata>(&url).await? {
                Some(metadata) => self.check_resource(metadata, &url).map(Some),
                None => Err(format!("its resource_metadata {url} cannot be found")),
            };
        }
        let origin = self.server_url.origin().ascii_serialization();
        let base = format!("{origin}/.well-known/oauth-protected-resource");
        let path = self.server_url.path().trim_end_matches('/');
        let with_path = (!path.is_empty()).then(|| format!("{base}{path}"));
        for address in with_path.into_iter().chain([base]) {
            let url = self.hosts.check(&address)?;
            if let Some(metadata) = self.document::<ResourceMetadata>(&url).await? {
                return self.check_resource(metadata, &url).map(Some);
            }
        }
        Ok(None)
    }

    /// Metadata of another resource must not be used (RFC 9728, section 3.3). That of a server at a parent path covers
    /// the paths below it.
    fn check_resource(
        &self,
        metadata: ResourceMetadata,
        found_at: &Url,
    ) -> Result<ResourceMetadata, String> {
        let covers = Url::parse(&metadata.resource).is_ok_and(|resource| {
            let path = resource.path().trim_end_matches('/');
            let below = self.server_url.path().strip_prefix(path);
            resource.origin() == self.server_url.origin()
                && resource.fragment().is_none()
                && below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        });
        match covers {
            true => Ok(metadata),
            false => Err(format!(
                "the metadata at {found_at} is for another resource: {}",
                show(&metadata.resource)
            )),
        }
    }

    /// The authorization server that may get this client's secret.
    fn choose_issuer(&self, resource: Option<&ResourceMetadata>) -> Result<String, String> {
        let configured = self.settings.issuer.as_ref();
        let listed = resource.map(|it| it.authorization_servers.as_slice());
        let listed = listed.filter(|it| !it.is_empty());
        match (configured, listed) {
            (Some(issuer), None) => Ok(issuer.clone()),
            (Some(issuer), Some(listed)) if listed.contains(issuer) => Ok(issuer.clone()),
            (Some(issuer), Some(listed)) => Err(format!(
                "it is not a resource of oauth.issuer {issuer}: it names {}",
                show_all(listed)
            )),
            // As servers of 2025-03-26 do, which have no metadata of their own.
            (None, None) => Ok(self.server_url.origin().ascii_serialization()),
            (None, Some(listed)) => {
                let host = self.server_url.host_str();
                let is_own =
                    |issuer: &&String| Url::parse(issuer).is_ok_and(|it| it.host_str() == host);
                listed.iter().find(is_own).cloned().ok_or_else(|| {
                    format!(
                        "it names the authorization server {}, which is on another host; if the client is registered \
                         there, set oauth.issuer in the agent's file",
                        show_all(listed)
                    )
                })
            }
        }
    }

    async fn server_metadata(&self, issuer: &str) -> Result<ServerMetadata, String> {
        let url = self.hosts.check(issuer);
        let url = url.map_err(|why| format!("the issuer {} is refused: {why}", show(issuer)))?;
        for address in metadata_addresses(&url) {
            let address = self.hosts.check(&address)?;
            let Some(metadata) = self.document::<ServerMetadata>(&address).await? else {
                continue;
            };
            return match metadata.issuer == issuer {
                true => Ok(metadata),
                false => Err(format!(
                    "the metadata at {address} is of another issuer: {} instead of {}",
                    show(&metadata.issuer),
                    show(issuer)
                )),
            };
        }
        Err(format!(
            "the authorization server {} has no metadata; set oauth.token_url in the agent's file",
            show(issuer)
        ))
    }

    /// A JSON document; `None` if there is none.
    async fn document<T: DeserializeOwned>(&self, url: &Url) -> Result<Option<T>, String> {
        let answer = self.http.get(self.hosts, url, "application/json").await;
        let answer = answer.map_err(|why| format!("{url} {why}"))?;
        match answer.status {
            200 => {}
            // Servers without such a document answer with any of these.
            400..500 => return Ok(None),
            status => return Err(format!("{url} answered with HTTP {status}")),
        }
        let document = serde_json::from_slice(&answer.body);
        document
            .map(Some)
            .map_err(|_| format!("{url} answered with something else than the metadata"))
    }
}

/// Where an issuer's metadata may be, in the order of MCP's text.
fn metadata_addresses(issuer: &Url) -> Vec<String> {
    let origin = issuer.origin().ascii_serialization();
    let path = issuer.path().trim_end_matches('/');
    let mut addresses = vec![
        format!("{origin}/.well-known/oauth-authorization-server{path}"),
        format!("{origin}/.well-known/openid-configuration{path}"),
    ];
    if !path.is_empty() {
        addresses.push(format!("{origin}{path}/.well-known/openid-configuration"));
    }
    addresses
}

/// A server's URL as a resource identifier: without the slash of an empty path.
pub fn canonical(url: &Url) -> String {
    match url.path() {
        "/" => url.as_str().trim_end_matches('/').to_owned(),
        _ => url.as_str().to_owned(),
    }
}

/// A text of a server, made fit for a message.
pub fn show(text: &str) -> String {
    shorten(text, MAX_SHOWN).replace(char::is_control, "\u{fffd}")
}

fn show_all(texts: &[String]) -> String {
    let shown: Vec<String> = texts.iter().take(3).map(|it| show(it)).collect();
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use url::Url;

    use super::{canonical, metadata_addresses};

    #[test]
    fn metadata_is_looked_for_in_the_order_of_the_text() {
        let of = |issuer: &str| metadata_addresses(&Url::parse(issuer).expect("a URL"));
        assert_eq!(
            of("https://auth.example.com/tenant1"),
            [
                "https://auth.example.com/.well-known/oauth-authorization-server/tenant1",
                "https://auth.example.com/.well-known/openid-configuration/tenant1",
                "https://auth.example.com/tenant1/.well-known/openid-configuration",
            ]
        );
        assert_eq!(
            of("https://auth.example.com"),
            [
                "https://auth.example.com/.well-known/oauth-authorization-server",
                "https://auth.example.com/.well-known/openid-configuration",
            ]
        );
    }

    #[test]
    fn a_server_without_a_path_has_no_slash() {
        let of = |url: &str| canonical(&Url::parse(url).expect("a URL"));
        assert_eq!(of("https://mcp.example.com/"), "https://mcp.example.com");
        assert_eq!(of("https://MCP.example.com/a"), "https://mcp.example.com/a");
    }
}

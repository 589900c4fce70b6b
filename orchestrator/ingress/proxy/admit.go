package proxy

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cubesandbox/cube/orchestrator/ingress"
	"github.com/cubesandbox/cube/orchestrator/ingress/target"
)

// headerEnvdToken is by which clients show envd's token.
const headerEnvdToken = "X-Access-Token"

// pass is what a request shows to be let through.
type pass struct {
	to      target.Target
	traffic string
	req     *http.Request
}

// admit says whether the request may go to a sandbox, or wake it. The error is a *refusal.
func (p *pass) admit(r ingress.Route, wake bool) error {
	if p.to.Port != ingress.EnvdPort {
		return p.admitPort(&r)
	}
	// envd asks for its tokens itself; only a sandbox that sleeps can't.
	if wake && r.Secure && !p.knowsEnvd(r.EnvdToken) {
		return &refusal{SandboxID: p.to.SandboxID, Message: "The sandbox is paused and is resumed only by a request with a valid access token", Code: http.StatusForbidden}
	}
	return nil
}

func (p *pass) admitPort(r *ingress.Route) error {
	if r.AllowPublic {
		return nil
	}
	sum := sha256.Sum256([]byte(p.traffic))
	const prefix = "Sandbox is secured with traffic access token. "
	switch {
	case p.traffic == "":
		return &refusal{SandboxID: p.to.SandboxID, Message: prefix + "Token header 'e2b-traffic-access-token' is missing", Code: http.StatusForbidden}
	case subtle.ConstantTimeCompare(sum[:], r.TrafficToken) != 1:
		return &refusal{SandboxID: p.to.SandboxID, Message: prefix + "Provided token in header 'e2b-traffic-access-token' is invalid", Code: http.StatusForbidden}
	}
	return nil
}

// knowsEnvd says whether a request shows that it is from somebody who has envd's token: by itself, or by a signature for a file.
func (p *pass) knowsEnvd(token string) bool {
	if token == "" {
		return false
	}
	if shown := p.req.Header.Get(headerEnvdToken); shown != "" {
		return subtle.ConstantTimeCompare([]byte(shown), []byte(token)) == 1
	}
	q := p.req.URL.Query()
	if p.req.URL.Path != "/files" || q.Get("signature") == "" {
		return false
	}
	expires := q.Get("signature_expiration")
	if expires != "" {
		if at, err := strconv.ParseInt(expires, 10, 64); err != nil || time.Now().Unix() > at {
			return false
		}
	}
	operation := "read"
	if p.req.Method == http.MethodPost {
		operation = "write"
	}
	want := signature(q.Get("path"), operation, q.Get("username"), token, expires)
	return subtle.ConstantTimeCompare([]byte(q.Get("signature")), []byte(want)) == 1
}

// signature is E2B's of an operation on a file.
func signature(path, operation, user, token, expires string) string {
	text := path + ":" + operation + ":" + user + ":" + token
	if expires != "" {
		text += ":" + expires
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + strings.TrimRight(base64.StdEncoding.EncodeToString(sum[:]), "=")
}

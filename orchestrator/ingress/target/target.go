// Package target finds out which port of which sandbox a request is for. It trusts nothing in a request and looks nothing up.
package target

import (
	"net/http"
	"net/netip"
	"path"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

// Names of E2B's headers.
const (
	HeaderID    = "E2b-Sandbox-Id"
	HeaderPort  = "E2b-Sandbox-Port"
	HeaderToken = "E2b-Traffic-Access-Token"
)

// maxLabel is the longest label of a host name, in bytes (RFC 1035, 2.3.4).
const maxLabel = 63

// Target is a port of a sandbox.
type Target struct {
	SandboxID string
	Port      uint16
}

// Of reads a request's target. With a Host of <port>-<id>[-anything].<domain> that is it, whatever the headers say: nobody who
// is at one sandbox's origin may get to another with a header. The headers count only where the Host is no sandbox's: localhost,
// an IP address, or sandbox.<domain>. The error is errdefs.ErrInvalidArgument, with a line for the client.
func Of(host string, header http.Header, domain string) (Target, error) {
	name, err := hostname(host)
	if err != nil {
		return Target{}, err
	}
	if Shared(name, domain) {
		return byHeader(header)
	}
	label, ok := strings.CutSuffix(name, "."+domain)
	if !ok {
		return Target{}, invalid("the host is none of this proxy's: use <port>-<sandbox id>." + domain)
	}
	port, rest, ok := strings.Cut(label, "-")
	id, suffix, _ := strings.Cut(rest, "-")
	if !ok || len(label) > maxLabel || !isName(suffix) {
		return Target{}, invalid("the host must be <port>-<sandbox id>." + domain)
	}
	return parse(id, port, "the host")
}

// Shared says whether a host name, in lower case and without a port, is not a sandbox's own.
func Shared(name, domain string) bool {
	if name == "localhost" || name == "sandbox."+domain {
		return true
	}
	_, err := netip.ParseAddr(name)
	return err == nil
}

// API says whether a host is the API's, which E2B's clients find at api.<domain>.
func API(host, domain string) bool {
	name, err := hostname(host)
	return err == nil && name == "api."+domain
}

// hostname is a Host header's name in lower case, without port, brackets and the root's dot.
func hostname(host string) (string, error) {
	name := host
	if rest, ok := strings.CutPrefix(host, "["); ok {
		inner, after, closed := strings.Cut(rest, "]")
		a, err := netip.ParseAddr(inner)
		if !closed || err != nil || !a.Is6() || after != "" && !isPort(after) {
			return "", invalid("the Host header is malformed")
		}
		return inner, nil
	}
	if i := strings.IndexByte(host, ':'); i >= 0 {
		if !isPort(host[i:]) {
			return "", invalid("the Host header is malformed")
		}
		name = host[:i]
	}
	name = strings.TrimSuffix(name, ".")
	if name == "" || len(name) > 253 {
		return "", invalid("the Host header is missing or too long")
	}
	return strings.ToLower(name), nil
}

// isPort says whether s is a colon and a port, or a colon alone, which RFC 3986 allows.
func isPort(s string) bool {
	if s == ":" {
		return true
	}
	_, err := strconv.ParseUint(strings.TrimPrefix(s, ":"), 10, 16)
	return err == nil
}

func byHeader(header http.Header) (Target, error) {
	ids, ports := header.Values(HeaderID), header.Values(HeaderPort)
	switch {
	case len(ids) == 0 && len(ports) == 0:
		return Target{}, invalid("the request names no sandbox: send the headers " + HeaderID + " and " + HeaderPort + ", or use the sandbox's host name")
	case len(ids) != 1:
		return Target{}, invalid("the header " + HeaderID + " must be there once")
	case len(ports) != 1:
		return Target{}, invalid("the header " + HeaderPort + " must be there once")
	}
	id, suffix, _ := strings.Cut(ids[0], "-")
	if !isName(suffix) {
		return Target{}, invalid("the header " + HeaderID + " isn't a sandbox id")
	}
	return parse(id, ports[0], "the header")
}

// parse reads an id and a port; from tells where they are from.
func parse(id, port, from string) (Target, error) {
	// Only the one way to write a port, so that nothing else that reads it can read another.
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || strconv.FormatUint(n, 10) != port {
		return Target{}, invalid("the port in " + from + " must be a number from 1 to 65535")
	}
	if !ValidID(id) {
		return Target{}, invalid("the sandbox id in " + from + " must be of small letters and digits")
	}
	return Target{SandboxID: id, Port: uint16(n)}, nil
}

// ValidID says whether a string can be a sandbox's id.
func ValidID(id string) bool {
	return id != "" && !strings.Contains(id, "-") && isName(id)
}

// isName says whether s is of what a label has, in small letters. "" is.
func isName(s string) bool {
	if len(s) > maxLabel {
		return false
	}
	for i := range len(s) {
		if c := s[i]; !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-') {
			return false
		}
	}
	return true
}

// reserved are envd's endpoints for the control plane alone, which goes to envd without this proxy.
var reserved = []string{"/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade"}

// Reserved says whether a decoded URL path is one of envd's that only the control plane may use, however it is written.
func (t Target) Reserved(urlPath string) bool {
	if t.Port != ingress.EnvdPort {
		return false
	}
	clean := path.Clean("/" + strings.ReplaceAll(urlPath, `\`, "/"))
	for _, r := range reserved {
		if strings.EqualFold(clean, r) || len(clean) > len(r) && strings.EqualFold(clean[:len(r)+1], r+"/") {
			return true
		}
	}
	return false
}

func invalid(line string) error { return errdefs.ErrInvalidArgument.WithMessage(line) }

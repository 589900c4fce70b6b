// Package auth decides whether a request may do what it asks for: by the sandbox's access token in a header or, for one
// file, by a signature in its address that was made with the token.
package auth

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/status"
)

// Header carries the access token.
const Header = "X-Access-Token"

// open are what have other means of their own, or need none.
var open = map[string]bool{
	"GET /health": true, "HEAD /health": true,
	"GET /files": true, "HEAD /files": true, "POST /files": true, // Files
	"POST /init": true, // package settings
}

// Guard lets a request pass that has the token, when one is set, or that needs none.
func Guard(token func() string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !open[r.Method+" "+r.URL.Path] && !Allowed(r, token()) {
			Hurry(w)
			status.WriteCode(w, http.StatusUnauthorized, "the request's header "+Header+" doesn't have this sandbox's access token")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// refusedTime is what a client that was refused gets to end its request in.
const refusedTime = time.Second

// Hurry has a client that is refused not hold a connection by sending its request slowly: there are only so many.
func Hurry(w http.ResponseWriter) {
	// Where the connection has no deadlines, it isn't a network's.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(refusedTime))
}

// Allowed says whether the request has the token, or none is set.
func Allowed(r *http.Request, token string) bool {
	return token == "" || Equal(r.Header.Get(Header), token)
}

// Equal compares secrets in a time that doesn't depend on what they are, nor on how long.
func Equal(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// Operation is what a signature allows.
type Operation string

const (
	Read  Operation = "read"
	Write Operation = "write"
)

// Files checks a request for a file: it has the token, or a signature for the path and user just as they are in its
// address. The error is errdefs.ErrUnauthenticated.
func Files(r *http.Request, query url.Values, op Operation, token string, now time.Time) error {
	if token == "" || r.Header.Get(Header) != "" && Allowed(r, token) {
		return nil
	}
	given := query.Get("signature")
	if given == "" {
		return refuse("missing signature query parameter")
	}
	var expires *int64
	if query.Has("signature_expiration") {
		n, err := strconv.ParseInt(query.Get("signature_expiration"), 10, 64)
		if err != nil {
			return refuse("invalid signature expiration")
		}
		expires = &n
	}
	if !Equal(given, Sign(query.Get("path"), op, query.Get("username"), token, expires)) {
		return refuse("invalid signature")
	}
	if expires != nil && *expires < now.Unix() {
		return refuse("signature is already expired")
	}
	return nil
}

func refuse(why string) error { return errdefs.ErrUnauthenticated.WithMessage(why) }

// Sign makes the signature. Expires is in seconds since 1970; nil is never.
func Sign(path string, op Operation, user, token string, expires *int64) string {
	signed := strings.Join([]string{path, string(op), user, token}, ":")
	if expires != nil {
		signed += ":" + strconv.FormatInt(*expires, 10)
	}
	sum := sha256.Sum256([]byte(signed))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

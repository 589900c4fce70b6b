package auth

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

const token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"

func TestVector(t *testing.T) {
	if got := Sign("hello.txt", Read, "user", token, nil); got != "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E" {
		t.Error(got)
	}
}

func TestGuard(t *testing.T) {
	is := token
	h := Guard(func() string { return is }, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	for _, c := range []struct {
		request, header string
		want            int
	}{
		{"GET /health", "", 418}, {"HEAD /health", "", 418}, {"GET /files", "", 418}, {"HEAD /files", "", 418}, {"POST /files", "", 418}, {"POST /init", "", 418},
		{"POST /health", "", 401}, {"GET /init", "", 401}, {"GET /metrics", "", 401}, {"GET /envs", "", 401}, {"POST /files/compose", "", 401},
		{"POST /process.Process/Start", "", 401}, {"POST /process.Process/Start", "wrong", 401}, {"POST /process.Process/Start", token[:31], 401},
		{"POST /process.Process/Start", token, 418}, {"GET /health/", "", 401}, {"GET //health", "", 401},
	} {
		method, path, _ := strings.Cut(c.request, " ")
		r := httptest.NewRequest(method, "http://box"+path, nil)
		if c.header != "" {
			r.Header.Set("x-access-token", c.header)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != c.want {
			t.Errorf("%s with %q: %d, want %d", c.request, c.header, w.Code, c.want)
		}
		var body struct {
			Code    int
			Message string
		}
		if w.Code == 401 && (json.Unmarshal(w.Body.Bytes(), &body) != nil || body.Code != 401 || body.Message == "") {
			t.Errorf("%s: %s", c.request, w.Body)
		}
	}
	is = ""
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", "/envs", nil))
	if w.Code != 418 {
		t.Error(w.Code)
	}
}

// signed is the query of an address that was signed.
func signed(path string, op Operation, user string, expires *int64) url.Values {
	q := url.Values{"path": {path}, "signature": {Sign(path, op, user, token, expires)}}
	if user != "" {
		q.Set("username", user)
	}
	if expires != nil {
		q.Set("signature_expiration", strconv.FormatInt(*expires, 10))
	}
	return q
}

func TestFiles(t *testing.T) {
	now := time.Unix(1000, 0)
	soon, past := int64(1000), int64(999)
	check := func(q url.Values, op Operation, header string) string {
		r := httptest.NewRequest("GET", "/files?"+q.Encode(), nil)
		if header != "" {
			r.Header.Set(Header, header)
		}
		err := Files(r, r.URL.Query(), op, token, now)
		if err == nil {
			return ""
		}
		if !errdefs.IsUnauthorized(err) {
			t.Errorf("%v", err)
		}
		return err.Error()
	}
	changed := func(key, value string) url.Values {
		q := signed("a b/ü", Read, "user", &soon)
		q.Set(key, value)
		return q
	}
	for name, c := range map[string]struct {
		q            url.Values
		op           Operation
		header, want string
	}{
		"token":               {url.Values{"path": {"x"}}, Read, token, ""},
		"signed":              {signed("a b/ü", Read, "", nil), Read, "", ""},
		"signed for a while":  {signed("a b/ü", Write, "user", &soon), Write, "", ""},
		"no signature":        {url.Values{"path": {"x"}}, Read, "", "missing signature query parameter"},
		"wrong token":         {url.Values{"path": {"x"}}, Read, "no", "missing signature query parameter"},
		"wrong token, signed": {signed("x", Read, "", nil), Read, "no", ""},
		"other operation":     {signed("x", Read, "", nil), Write, "", "invalid signature"},
		"other path":          {changed("path", "a b"), Read, "", "invalid signature"},
		"other user":          {changed("username", "root"), Read, "", "invalid signature"},
		"no user":             {changed("username", ""), Read, "", "invalid signature"},
		"later end":           {changed("signature_expiration", "2000"), Read, "", "invalid signature"},
		"no number":           {changed("signature_expiration", "1e9"), Read, "", "invalid signature expiration"},
		"empty end":           {changed("signature_expiration", ""), Read, "", "invalid signature expiration"},
		"empty signature":     {changed("signature", ""), Read, "", "missing signature query parameter"},
		"padding":             {changed("signature", Sign("a b/ü", Read, "user", token, &soon)+"="), Read, "", "invalid signature"},
		"over":                {signed("x", Read, "", &past), Read, "", "signature is already expired"},
	} {
		if got := check(c.q, c.op, c.header); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// FuzzFiles: what was signed passes, and nothing else that can be made of it without the token.
func FuzzFiles(f *testing.F) {
	f.Add("hello.txt", "user", "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E", "")
	f.Add("a:b", "", "v1_", "-1")
	f.Fuzz(func(t *testing.T, path, user, signature, expires string) {
		q := url.Values{"path": {path}, "username": {user}, "signature": {signature}}
		if expires != "" {
			q.Set("signature_expiration", expires)
		}
		r := httptest.NewRequest("GET", "/files", nil)
		err := Files(r, q, Read, "a token that nobody knows", time.Now())
		if err == nil {
			t.Errorf("%q passes", q)
		}
		q.Del("signature_expiration")
		q.Set("signature", Sign(path, Read, user, token, nil))
		if err := Files(r, q, Read, token, time.Now()); err != nil {
			t.Error(err)
		}
	})
}

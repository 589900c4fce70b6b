package settings

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// TestHookToken: the default user alone reads the latest token; where there is no such user, root.
func TestHookToken(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("it takes root to give files away")
	}
	dir := t.TempDir()
	passwd := filepath.Join(dir, "passwd")
	if err := os.WriteFile(passwd, []byte("root:x:0:0::/root:/bin/sh\nuser:x:1234:1235::/home/user:/bin/bash\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &Store{Dir: filepath.Join(dir, "run"), Users: users.Database{Passwd: passwd, Group: os.DevNull}}
	if err := s.Load(Settings{User: "nosuch"}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.Dir, hookToken)
	call := func(body string) {
		t.Helper()
		w := httptest.NewRecorder()
		s.Init(w, httptest.NewRequest(http.MethodPost, "/init", strings.NewReader(body)))
		if w.Code != http.StatusNoContent {
			t.Fatalf("%s: %d %s", body, w.Code, w.Body)
		}
	}
	call(`{}`)
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("without a token there is a file: %v", err)
	}
	for _, c := range []struct {
		body, token string
		uid, gid    uint32
	}{
		{`{"hookToken":"first"}`, "first", 0, 0},
		{`{"hookToken":"second","defaultUser":"user"}`, "second", 1234, 1235},
		{`{"defaultUser":"user"}`, "second", 1234, 1235},
	} {
		call(c.body)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		owner := st.Sys().(*syscall.Stat_t)
		if string(b) != c.token || st.Mode().Perm() != 0o400 || owner.Uid != c.uid || owner.Gid != c.gid {
			t.Errorf("%s: %q, %v of %d:%d", c.body, b, st.Mode(), owner.Uid, owner.Gid)
		}
	}
}

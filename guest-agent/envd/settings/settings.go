// Package settings keeps what the control plane has told envd by /init: token, identity, environment, defaults. A file in
// the sandbox's memory keeps it for an envd that is started anew.
package settings

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// Settings are a state of it. The maps aren't changed.
type Settings struct {
	Token      string            // empty: everybody may do everything
	HookToken  string            // by which the sandbox's init hook knows the control plane
	Env        map[string]string // of users, for each process
	SandboxID  string
	TemplateID string
	User       string // who commands run as when a request names nobody
	Workdir    string // where; empty: home
	Lifecycle  string // of which start, restore or fork of the sandbox the last /init told
	Stamp      time.Time
}

// Environ is what the control plane gives to each process: the users' variables, and the sandbox's identity, which those
// can't change.
func (s Settings) Environ() map[string]string {
	env := map[string]string{}
	maps.Copy(env, s.Env)
	env["E2B_SANDBOX"] = "true"
	for name, value := range map[string]string{"E2B_SANDBOX_ID": s.SandboxID, "E2B_TEMPLATE_ID": s.TemplateID} {
		delete(env, name)
		if value != "" {
			env[name] = value
		}
	}
	return env
}

// Store is the place of the settings.
type Store struct {
	// Users are who a default user may be.
	Users users.Database
	// Dir is where the settings' file and the facts for the sandbox's programs are; empty: nowhere.
	Dir string
	// SetClock sets the machine's clock; nil: it is somebody else's.
	SetClock func(time.Time) error
	// Hosts is the file that gets the machine's name, which it has by the time of /init; empty: none.
	Hosts string

	turn sync.Mutex // of changes, held while files are written
	// What this daemon has done already; turn guards it.
	facts map[string]string // files that it has written, by name
	found string            // the default user that there was
	host  string            // the name that is among the hosts

	mu  sync.Mutex
	now Settings
}

// file is the settings' own, in Dir; only root reads it.
const file = ".envd"

// Load takes over what an envd before this one had, or the default that is given.
func (s *Store) Load(start Settings) error {
	s.now = start
	if s.Dir == "" {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(s.Dir, file))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read envd's settings: %w", err)
	}
	if err := json.Unmarshal(b, &s.now); err != nil {
		return fmt.Errorf("read envd's settings: %w", err)
	}
	return nil
}

// Forget removes what an envd of an earlier boot has left. For who starts the first one.
func Forget(dir string) error {
	err := os.Remove(filepath.Join(dir, file))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Get returns the settings as they are.
func (s *Store) Get() Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// Token returns the access token.
func (s *Store) Token() string { return s.Get().Token }

// set writes the settings and then has them hold. The caller has the turn.
func (s *Store) set(n Settings) error {
	if s.Dir != "" {
		if err := s.write(n); err != nil {
			return fmt.Errorf("keep envd's settings: %w", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = n
	return nil
}

func (s *Store) write(n Settings) error {
	if err := os.MkdirAll(s.Dir, 0o755); err != nil {
		return err
	}
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	facts := map[string]string{".E2B_SANDBOX": "true", ".E2B_SANDBOX_ID": n.SandboxID, ".E2B_TEMPLATE_ID": n.TemplateID}
	for name, value := range facts {
		if was, ok := s.facts[name]; ok && was == value {
			continue
		}
		if err := replace(filepath.Join(s.Dir, name), []byte(value), 0o644); err != nil {
			return err
		}
		if s.facts == nil {
			s.facts = map[string]string{}
		}
		s.facts[name] = value
	}
	if err := s.writeHookToken(n); err != nil {
		return err
	}
	return replace(filepath.Join(s.Dir, file), b, 0o600)
}

// hookToken is a file that only the default user reads, whose programs serve the hook, and root.
const hookToken = ".E2B_HOOK_TOKEN"

func (s *Store) writeHookToken(n Settings) error {
	if n.HookToken == "" {
		return nil
	}
	path := filepath.Join(s.Dir, hookToken)
	if err := replace(path, []byte(n.HookToken), 0o400); err != nil {
		return err
	}
	u, err := s.Users.Lookup(n.User)
	if errdefs.IsNotFound(err) { // it is root's then
		return nil
	}
	if err != nil {
		return err
	}
	return os.Lchown(path, int(u.UID), int(u.GID))
}

// replace writes a file that is there as a whole or as it was.
func replace(path string, content []byte, mode os.FileMode) error {
	tmp := path + ".next"
	f, err := create(tmp, mode)
	if errors.Is(err, fs.ErrExist) { // an envd that was killed has left it
		if err := os.Remove(tmp); err != nil {
			return err
		}
		f, err = create(tmp, mode)
	}
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Close()); err == nil {
		err = unix.Rename(tmp, path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(tmp))
	}
	return nil
}

func create(path string, mode os.FileMode) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
}

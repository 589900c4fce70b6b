// Package users reads who is who from a sandbox's passwd and group, which the sandbox may have written: lines that can't be
// right are nobody's. Nothing is kept, as both change while envd runs.
package users

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// Limits of what is read; of larger files the first part counts.
const (
	maxFile   = 16 << 20
	maxGroups = 65536 // the kernel's NGROUPS_MAX
	maxPath   = 4096  // the kernel's PATH_MAX
)

// User is somebody that commands may run as.
type User struct {
	Name   string
	UID    uint32
	GID    uint32
	Home   string // absolute
	Groups []uint32
}

// Database is where users are found.
type Database struct {
	Passwd string // /etc/passwd
	Group  string // /etc/group
}

// System is the sandbox's own.
var System = Database{Passwd: "/etc/passwd", Group: "/etc/group"}

// Lookup finds a user by name. The error is errdefs.ErrNotFound where there is none.
func (d Database) Lookup(name string) (User, error) {
	var found *User
	err := lines(d.Passwd, func(f []string) bool {
		if u, ok := parseUser(f); ok && u.Name == name {
			found = &u
		}
		return found == nil
	})
	if err != nil {
		return User{}, fmt.Errorf("look for user %q: %w", name, err)
	}
	if found == nil {
		return User{}, errdefs.ErrNotFound.WithMessage("there is no user " + strconv.Quote(name))
	}
	found.Groups = []uint32{found.GID}
	err = lines(d.Group, func(f []string) bool {
		g, ok := parseGroup(f)
		if ok && slices.Contains(g.members, name) && !slices.Contains(found.Groups, g.gid) {
			found.Groups = append(found.Groups, g.gid)
		}
		return len(found.Groups) < maxGroups
	})
	if err != nil {
		return User{}, fmt.Errorf("look for the groups of user %q: %w", name, err)
	}
	return *found, nil
}

// Owner finds whose files are to be: NAME, NAME:GROUP, or numbers for either. A number alone is its group's, too. The error is
// errdefs.ErrInvalidArgument.
func (d Database) Owner(text string) (User, error) {
	name, group, grouped := strings.Cut(text, ":")
	var u User
	if id, err := number(name); err == nil {
		u = User{Name: name, UID: id, GID: id}
	} else if u, err = d.Lookup(name); err != nil {
		return User{}, errdefs.ErrInvalidArgument.WithMessage(err.Error())
	}
	if !grouped {
		return u, nil
	}
	if id, err := number(group); err == nil {
		u.GID = id
		return u, nil
	}
	found := false
	err := lines(d.Group, func(f []string) bool {
		if g, ok := parseGroup(f); ok && g.name == group {
			u.GID, found = g.gid, true
		}
		return !found
	})
	if err == nil && !found {
		err = errdefs.ErrInvalidArgument.WithMessage("there is no group " + strconv.Quote(group))
	}
	return u, err
}

// Names are the names of numbers, as they were at one time.
type Names struct {
	users, groups map[uint32]string
}

// Names reads all names. Files that can't be read have none.
func (d Database) Names() Names {
	n := Names{users: map[uint32]string{}, groups: map[uint32]string{}}
	_ = lines(d.Passwd, func(f []string) bool {
		if u, ok := parseUser(f); ok {
			setFirst(n.users, u.UID, u.Name)
		}
		return true
	})
	_ = lines(d.Group, func(f []string) bool {
		if g, ok := parseGroup(f); ok {
			setFirst(n.groups, g.gid, g.name)
		}
		return true
	})
	return n
}

func setFirst(m map[uint32]string, id uint32, name string) {
	if _, ok := m[id]; !ok {
		m[id] = name
	}
}

// User is the name of a user, or the number in digits.
func (n Names) User(uid uint32) string { return nameOf(n.users, uid) }

// Group is the name of a group, or the number in digits.
func (n Names) Group(gid uint32) string { return nameOf(n.groups, gid) }

func nameOf(m map[uint32]string, id uint32) string {
	if name, ok := m[id]; ok {
		return name
	}
	return strconv.FormatUint(uint64(id), 10)
}

// lines calls each with the fields of every line, until it returns false. A file that doesn't exist has none.
func lines(path string, each func(fields []string) bool) error {
	f, err := os.Open(path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return err
	}
	s := bufio.NewScanner(bytes.NewReader(content))
	s.Buffer(nil, maxFile+1)
	for s.Scan() {
		if !each(strings.Split(s.Text(), ":")) {
			break
		}
	}
	return s.Err()
}

func parseUser(f []string) (User, bool) {
	if len(f) != 7 || f[0] == "" {
		return User{}, false
	}
	uid, uidErr := number(f[2])
	gid, gidErr := number(f[3])
	if uidErr != nil || gidErr != nil {
		return User{}, false
	}
	home := f[5]
	if !filepath.IsAbs(home) || strings.ContainsRune(home, 0) {
		home = "/"
	}
	return User{Name: f[0], UID: uid, GID: gid, Home: filepath.Clean(home)}, true
}

type group struct {
	name    string
	gid     uint32
	members []string
}

func parseGroup(f []string) (group, bool) {
	if len(f) != 4 || f[0] == "" {
		return group{}, false
	}
	gid, err := number(f[2])
	return group{name: f[0], gid: gid, members: strings.Split(f[3], ",")}, err == nil
}

// number takes an id; the kernel has another use for the largest one.
func number(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err == nil && n == 1<<32-1 {
		err = strconv.ErrRange
	}
	return uint32(n), err
}

// Resolve makes a path absolute and clean: a relative one is below the user's home, as is "~". An empty one is the
// directory that is given, or home where that is empty too. The error is errdefs.ErrInvalidArgument.
func (u User) Resolve(path, empty string) (string, error) {
	if path == "" {
		path = empty
	}
	switch {
	case strings.ContainsRune(path, 0):
		return "", errdefs.ErrInvalidArgument.WithMessage("path " + strconv.Quote(path) + " has a zero byte")
	case len(path) >= maxPath:
		return "", errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("path of %d bytes; the kernel takes %d", len(path), maxPath-1))
	case path == "~":
		return u.Home, nil
	case strings.HasPrefix(path, "~/"):
		path = path[2:]
	case filepath.IsAbs(path):
		return filepath.Clean(path), nil
	}
	return filepath.Join(u.Home, path), nil
}

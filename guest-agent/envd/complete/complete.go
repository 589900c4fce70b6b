// Package complete gives a sandbox's disk what E2B's SDKs need and its image lacks: a user, and bash where they look for it.
package complete

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// Disk is a sandbox's, as its root sees it.
type Disk struct {
	// Root is where it is: "/".
	Root string
	// Out is told, by lines, what was done.
	Out io.Writer
}

// maxFile bounds what is read of a file.
const maxFile = 16 << 20

// Complete does it for the user of that name. What is there already is left as it is. The error is errdefs.ErrFailedPrecondition
// where it can't be done, and says what the image has to have.
func (d Disk) Complete(user string) error {
	if err := d.bash(); err != nil {
		return err
	}
	if err := d.tmp(); err != nil {
		return err
	}
	db := users.Database{Passwd: d.path("/etc/passwd"), Group: d.path("/etc/group")}
	_, err := db.Lookup(user)
	if !errdefs.IsNotFound(err) {
		return err
	}
	return d.addUser(db, user)
}

func (d Disk) path(p string) string { return filepath.Join(d.Root, p) }

func (d Disk) say(format string, args ...any) { fmt.Fprintf(d.Out, format+"\n", args...) }

// has tells whether there is a program.
func (d Disk) has(program string) bool {
	info, err := os.Stat(d.path(program))
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// bash has /bin/bash be a bash that is elsewhere. Where there is none, a shell has to be there by which steps can bring one.
func (d Disk) bash() error {
	const at = "/bin/bash"
	if d.has(at) {
		return nil
	}
	for _, other := range []string{"/usr/bin/bash", "/usr/local/bin/bash"} {
		if !d.has(other) {
			continue
		}
		if err := os.Symlink(other, d.path(at)); err != nil {
			return err
		}
		d.say("%s is %s", at, other)
		return nil
	}
	if !d.has("/bin/sh") {
		return errdefs.ErrFailedPrecondition.WithMessage("the image has no shell, neither /bin/bash, by which E2B's SDKs run commands, nor /bin/sh, by which a step could install it: put bash into the image")
	}
	d.say("the image has no bash: steps are done by /bin/sh until one of them has installed it")
	return nil
}

// tmp is where everybody may write.
func (d Disk) tmp() error {
	at := d.path("/tmp")
	err := os.Mkdir(at, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil {
		err = os.Chmod(at, fs.ModeSticky|0o777)
	}
	if err == nil {
		d.say("made /tmp")
	}
	return err
}

// firstID is the first number for a user, as useradd(8) has it.
const firstID, lastID = 1000, 60000

// addUser does what useradd -m -s /bin/bash does, and lets the user become root.
func (d Disk) addUser(db users.Database, name string) error {
	id, err := freeID(db.Names())
	if err != nil {
		return err
	}
	home := "/home/" + name
	if err := d.makeHome(home, id); err != nil {
		return err
	}
	number := fmt.Sprint(id)
	group := strings.Join([]string{name, "x", number, ""}, ":")
	if err := d.edit("/etc/group", 0o644, func(lines []string) []string {
		return append(join(lines, name, "sudo", "wheel", "admin"), group)
	}); err != nil {
		return err
	}
	for file, line := range map[string]string{"/etc/shadow": name + ":!:::::::", "/etc/gshadow": name + ":!::"} {
		if _, err := os.Stat(d.path(file)); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := d.edit(file, 0o640, func(lines []string) []string { return append(lines, line) }); err != nil {
			return err
		}
	}
	// Last: with it the user is there.
	user := strings.Join([]string{name, "x", number, number, "", home, "/bin/bash"}, ":")
	if err := d.edit("/etc/passwd", 0o644, func(lines []string) []string { return append(lines, user) }); err != nil {
		return err
	}
	d.say("made the user %s, %d, with the home %s", name, id, home)
	return d.allow(name)
}

// freeID is a number that neither a user nor a group has.
func freeID(n users.Names) (uint32, error) {
	for id := uint32(firstID); id < lastID; id++ {
		text := fmt.Sprint(id)
		if n.User(id) == text && n.Group(id) == text {
			return id, nil
		}
	}
	return 0, errdefs.ErrFailedPrecondition.WithMessage("the image has no number left for a user")
}

// join has a user be a member of those of the groups that there are.
func join(lines []string, user string, groups ...string) []string {
	for i, l := range lines {
		f := strings.Split(l, ":")
		for _, g := range groups {
			if len(f) == 4 && f[0] == g {
				f[3] = strings.TrimPrefix(f[3]+","+user, ",")
				lines[i] = strings.Join(f, ":")
			}
		}
	}
	return lines
}

// edit changes the lines of a file, as a whole or not at all.
func (d Disk) edit(file string, mode fs.FileMode, change func(lines []string) []string) error {
	at := d.path(file)
	var lines []string
	content, err := readBounded(at)
	switch {
	case err == nil:
		if text := strings.TrimSuffix(string(content), "\n"); text != "" {
			lines = strings.Split(text, "\n")
		}
		info, err := os.Stat(at)
		if err != nil {
			return err
		}
		mode = info.Mode().Perm()
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	text := strings.Join(change(lines), "\n") + "\n"
	return d.write(at, mode, text)
}

func readBounded(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = errdefs.ErrFailedPrecondition.WithMessage(file + " is too large")
	}
	return b, err
}

// write replaces a file, whose owner and group the other one keeps.
func (d Disk) write(at string, mode fs.FileMode, text string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(at), ".cube-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.WriteString(text)
	if uid, gid, ok := ownerOf(at); err == nil && ok {
		err = f.Chown(uid, gid)
	}
	if err == nil {
		err = f.Chmod(mode)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), at)
}

// makeHome makes a home with what /etc/skel has for it.
func (d Disk) makeHome(home string, id uint32) error {
	at := d.path(home)
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	skel := d.path("/etc/skel")
	err := filepath.WalkDir(skel, func(from string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && from == skel {
			return fs.SkipAll
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(skel, from)
		if err != nil {
			return err
		}
		to := filepath.Join(at, rel)
		switch {
		case e.IsDir():
			if err := os.MkdirAll(to, 0o755); err != nil {
				return err
			}
		case e.Type().IsRegular():
			if _, err := os.Lstat(to); err == nil {
				return nil // it was there
			}
			content, err := readBounded(from)
			if err == nil {
				err = os.WriteFile(to, content, 0o644)
			}
			if err != nil {
				return err
			}
		default:
			return nil
		}
		return os.Lchown(to, int(id), int(id))
	})
	return errors.Join(err, os.Lchown(at, int(id), int(id)))
}

// allow lets the user become root without a password, where there is sudo.
func (d Disk) allow(name string) error {
	const dir = "/etc/sudoers.d"
	if info, err := os.Stat(d.path(dir)); !d.has("/usr/bin/sudo") || err != nil || !info.IsDir() {
		d.say("the image has no sudo: %s can't become root; commands can be run as root by who has the sandbox", name)
		return nil
	}
	return d.write(d.path(dir+"/90-cube-"+name), 0o440, name+" ALL=(ALL:ALL) NOPASSWD:ALL\n")
}

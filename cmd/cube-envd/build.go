package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/cubesandbox/cube/guest-agent/envd/complete"
	"github.com/cubesandbox/cube/guest-agent/envd/unpack"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// unpackFiles takes the files of a COPY from stdin.
func unpackFiles(args []string) error {
	flags := flag.NewFlagSet("cube-envd unpack", flag.ExitOnError)
	var user, workdir string
	defaults(flags, &user, &workdir)
	owner := flags.String("owner", "", "whose files are to be, `USER[:GROUP]` (the user)")
	mode := flags.String("mode", "", "what `mode` they get, octal (their own)")
	_ = flags.Parse(args)
	if flags.NArg() != 2 {
		return errors.New("unpack takes what is copied and where to")
	}
	r := unpack.Request{From: flags.Arg(0)}
	u, err := users.System.Lookup(user)
	if err != nil {
		return err
	}
	if r.To, err = destination(u, workdir, flags.Arg(1)); err != nil {
		return err
	}
	r.Owner = u
	if *owner != "" {
		if r.Owner, err = users.System.Owner(*owner); err != nil {
			return err
		}
	}
	if *mode != "" {
		if r.Mode, err = fileMode(*mode); err != nil {
			return err
		}
	}
	return unpack.Unpack(os.Stdin, r)
}

// destination is a path as it is seen from a directory. A slash at its end stays.
func destination(u users.User, workdir, to string) (string, error) {
	if !path.IsAbs(to) && to != "~" && !strings.HasPrefix(to, "~/") {
		slash := strings.HasSuffix(to, "/") || path.Base(to) == "." || path.Base(to) == ".."
		to = path.Join(workdir, to)
		if workdir == "" {
			to = path.Join("~", to)
		}
		if slash {
			to += "/"
		}
	}
	at, err := u.Resolve(to, "")
	if err == nil && strings.HasSuffix(to, "/") && at != "/" {
		at += "/"
	}
	return at, err
}

// fileMode is a mode of octal digits.
func fileMode(text string) (*fs.FileMode, error) {
	n, err := strconv.ParseUint(text, 8, 12)
	if err != nil {
		return nil, fmt.Errorf("mode %q: octal digits up to 7777 are needed", text)
	}
	m := fs.FileMode(n & 0o777)
	for bit, of := range map[uint64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if n&bit != 0 {
			m |= of
		}
	}
	return &m, nil
}

// completeDisk gives the disk what its image lacks.
func completeDisk(args []string) error {
	flags := flag.NewFlagSet("cube-envd complete", flag.ExitOnError)
	user := flags.String("user", "user", "`name` of the user that there is to be")
	_ = flags.Parse(args)
	if flags.NArg() > 0 {
		return fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	return complete.Disk{Root: "/", Out: os.Stdout}.Complete(*user)
}
